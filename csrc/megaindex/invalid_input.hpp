// The exception of kernels for invalid arguments.
#pragma once

#include <stdexcept>

namespace megaindex {

struct InvalidInput : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace megaindex
