// Long kernels call a Poll now and then, so that the caller can stop them (it may throw).
#pragma once

#include <atomic>
#include <thread>

namespace megaindex {

struct NoPoll {
  void operator()() const {}
};

// A Poll for the threads of one kernel: that which made it asks, and the others end when it was told
// to.
template <class Poll>
class SharedPoll {
 public:
  struct Stopped {};  // thrown in the others; the first thread throws what its Poll threw

  explicit SharedPoll(Poll& poll) : poll_(poll) {}

  void operator()() const {
    if (stopped_) throw Stopped{};
    if (std::this_thread::get_id() != asking_) return;
    try {
      poll_();
    } catch (...) {
      stopped_ = true;
      throw;
    }
  }

 private:
  Poll& poll_;
  const std::thread::id asking_ = std::this_thread::get_id();
  mutable std::atomic<bool> stopped_{false};
};

}  // namespace megaindex
