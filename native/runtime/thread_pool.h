// The engine's threads.  A pool is passed to whoever uses it; there is no global one.
#pragma once

#include <cstddef>
#include <memory>

namespace topg {

// A fixed number of threads that run one function together ("SPMD"): the caller is thread 0.
// Runs of several callers wait for each other.  Between runs workers spin for a moment, then sleep; inside a run they meet at barriers.
// A pool belongs to the process that made it: after a fork, a run in the child throws.
class ThreadPool {
 public:
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const;
  // Throws std::runtime_error in a fork.  A lock that the parent held stays locked there: ask before waiting for one.
  void check_process() const;

  // Call function(thread) on every thread and return when all are done.  `function` must not throw.
  template <class Function>
  void run(Function&& function) {
    run_erased([](void* context, int thread) { (*static_cast<Function*>(context))(thread); }, (void*)&function);
  }

  // Wait until every thread of the current run has called this as often as the caller.  Orders memory.
  void barrier(int thread);

 private:
  void run_erased(void (*function)(void* context, int thread), void* context);

  struct State;
  std::unique_ptr<State> state_;
};

// The part [begin, end) of `count` units that belongs to `thread` of `threads`.
struct Range {
  int begin, end;
};
inline Range share(int count, int thread, int threads) {
  return {int(long(count) * thread / threads), int(long(count) * (thread + 1) / threads)};
}

}  // namespace topg
