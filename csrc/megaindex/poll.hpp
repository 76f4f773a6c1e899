// Polls: callbacks of long kernels, which may throw to stop them.
#pragma once

#include <atomic>
#include <thread>

namespace megaindex {

struct NoPoll {
  void operator()() const {}
};

// A Poll shared by the threads of one kernel. The thread that made it calls the Poll; if that
// throws, the others stop.
template <class Poll>
class SharedPoll {
 public:
  struct Stopped {};  // thrown in the others; the first thread throws what its Poll threw

  explicit SharedPoll(Poll& poll) : poll_(poll) {}

  void operator()() const {
    if (stopped_) throw Stopped{};
    if (std::this_thread::get_id() != owner_) return;
    try {
      poll_();
    } catch (...) {
      stopped_ = true;
      throw;
    }
  }

 private:
  Poll& poll_;
  const std::thread::id owner_ = std::this_thread::get_id();
  mutable std::atomic<bool> stopped_{false};
};

}  // namespace megaindex
