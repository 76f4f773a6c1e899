// Running the parts of a job on threads, as many as the system can start.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace megaindex {

// Threads that are joined at the end of their scope, also by an exception: destroying a std::thread
// that is not joined ends the process.
template <class Thread = std::thread>
class JoinedThreads {
 public:
  explicit JoinedThreads(int64_t most) { threads_.reserve(static_cast<size_t>(most)); }
  JoinedThreads(const JoinedThreads&) = delete;
  JoinedThreads& operator=(const JoinedThreads&) = delete;
  ~JoinedThreads() {
    for (auto& thread : threads_) thread.join();
  }

  // Start a thread for the task, or return false if the system cannot start one.
  template <class Task>
  bool start(Task task) {
    try {
      threads_.emplace_back(std::move(task));
    } catch (const std::system_error&) {
      return false;
    }
    return true;
  }

 private:
  std::vector<Thread> threads_;
};

// Run task(0) ... task(count - 1), count >= 1: the first on the caller's thread, each other on its
// own, or on the caller's if none can be started. Rethrow the exception of the first part that
// threw.
template <class Thread = std::thread, class Task>
void run_parallel(int64_t count, const Task& task) {
  std::vector<std::exception_ptr> errors(static_cast<size_t>(count));
  const auto run = [&](int64_t part) {
    try {
      task(part);
    } catch (...) {
      errors[static_cast<size_t>(part)] = std::current_exception();
    }
  };
  {
    JoinedThreads<Thread> threads(count - 1);
    int64_t next = 1;
    while (next < count && threads.start([&run, next] { run(next); })) ++next;
    run(0);
    for (; next < count; ++next) run(next);
  }
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace megaindex
