// What a kernel throws when its input cannot be what the caller says it is.
#pragma once

#include <stdexcept>

namespace megaindex {

struct InvalidInput : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace megaindex
