// Long kernels call a Poll now and then, so that the caller can stop them (it may throw).
#pragma once

namespace megaindex {

struct NoPoll {
  void operator()() const {}
};

}  // namespace megaindex
