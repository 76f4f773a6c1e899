// Parts of one job on threads of their own, as far as the system starts any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace megaindex {

// Threads that are waited for where they go out of scope, also when an exception leaves it: a
// std::thread that is destroyed before that ends the process.
template <class Thread = std::thread>
class JoinedThreads {
 public:
  explicit JoinedThreads(int64_t most) { threads_.reserve(static_cast<size_t>(most)); }
  JoinedThreads(const JoinedThreads&) = delete;
  JoinedThreads& operator=(const JoinedThreads&) = delete;
  ~JoinedThreads() {
    for (auto& thread : threads_) thread.join();
  }

  // Whether a thread runs the task: false where the system has no thread left.
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

// Runs task(0) ... task(count - 1), count >= 1: the first on the caller's thread, each other on its
// own, those for which none starts on the caller's too. Rethrows the first part's exception.
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
