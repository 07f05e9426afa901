#include "runtime/thread_pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif

namespace topg {
namespace {

constexpr int kMaxThreads = 1024;
// How long a thread spins before it sleeps.  That covers the barriers of a step and most gaps between steps; sleeping then
// leaves the core to the thread that is waited for.  Yielding instead would not: with more busy threads than cores, one that
// yielded gets its core back after several time slices, a sleeper soon after it is woken.
constexpr std::chrono::microseconds kSpin(30);
constexpr int kLoads = 64;   // before the first pause
constexpr int kPauses = 64;  // between two looks at the clock

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A number that one thread raises and others wait for.  Aligned to the pairs of cache lines that are fetched together.
class alignas(128) Counter {
 public:
  // Returns the new value.
  uint32_t raise() {
    const uint32_t value = value_.fetch_add(1) + 1;
    if (sleepers_.load() == 0) return value;
    { std::lock_guard<std::mutex> lock(mutex_); }  // by now, whoever counted itself sleeps or will see the new value
    raised_.notify_all();
    return value;
  }

  // Returns when the value is `wanted` or one after it.
  void wait_for(uint32_t wanted) {
    if (spin_for(wanted)) return;
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1);
    raised_.wait(lock, [&] { return reached(wanted); });
    sleepers_.fetch_sub(1);
  }

 private:
  bool reached(uint32_t wanted) const { return int32_t(value_.load() - wanted) >= 0; }

  bool spin_for(uint32_t wanted) const {
    for (int i = 0; i < kLoads; ++i) {
      if (reached(wanted)) return true;
    }
    const auto end = std::chrono::steady_clock::now() + kSpin;
    do {
      for (int i = 0; i < kPauses; ++i) {
        if (reached(wanted)) return true;
        pause();
      }
    } while (std::chrono::steady_clock::now() < end);
    return false;
  }

  std::atomic<uint32_t> value_{0};
  std::atomic<uint32_t> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable raised_;
};

// The process that owns the worker threads: a fork has none of them.
long current_process() {
#if defined(__unix__) || defined(__APPLE__)
  return long(getpid());
#else
  return 0;
#endif
}

}  // namespace

struct ThreadPool::State {
  explicit State(int thread_count) : arrived(size_t(thread_count)) {}

  std::vector<Counter> arrived;  // barriers each thread has reached
  Counter runs;                  // runs begun
  std::mutex running;            // of whoever runs
  void (*function)(void*, int) = nullptr;  // null: the workers are to end
  void* context = nullptr;
  std::vector<std::thread> workers;
  const long process = current_process();

  void start(void (*next)(void*, int), void* next_context) {
    function = next;
    context = next_context;
    runs.raise();
  }

  void work(ThreadPool& pool, int thread) {
    for (uint32_t run = 1;; ++run) {
      runs.wait_for(run);
      if (function == nullptr) return;
      function(context, thread);
      pool.barrier(thread);
    }
  }

  void stop() {
    start(nullptr, nullptr);
    for (std::thread& worker : workers) worker.join();
  }
};

ThreadPool::ThreadPool(int threads) {
  if (threads < 1 || threads > kMaxThreads) {
    throw std::invalid_argument("threads is " + std::to_string(threads) + "; allowed: 1 to " +
                                std::to_string(kMaxThreads));
  }
  state_ = std::make_unique<State>(threads);
  try {
    for (int thread = 1; thread < threads; ++thread) {
      state_->workers.emplace_back([this, thread] { state_->work(*this, thread); });
    }
  } catch (const std::system_error&) {
    const size_t started = state_->workers.size() + 1;
    state_->stop();
    throw std::runtime_error("the system refused thread " + std::to_string(started + 1) + " of " +
                             std::to_string(threads) + "; use fewer threads");
  }
}

ThreadPool::~ThreadPool() {
  if (state_->process == current_process()) {
    state_->stop();
  } else {
    state_.release();  // after a fork: what it holds waits for threads that do not exist here
  }
}

int ThreadPool::size() const { return int(state_->arrived.size()); }

void ThreadPool::check_process() const {
  if (state_->process == current_process()) return;
  throw std::runtime_error("this process was forked from the one that loaded the model; load the model again in it");
}

void ThreadPool::run_erased(void (*function)(void*, int), void* context) {
  check_process();
  const std::lock_guard<std::mutex> lock(state_->running);
  state_->start(function, context);
  function(context, 0);
  barrier(0);
}

void ThreadPool::barrier(int thread) {
  std::vector<Counter>& arrived = state_->arrived;
  if (arrived.size() == 1) return;
  const uint32_t round = arrived[size_t(thread)].raise();
  for (Counter& other : arrived) other.wait_for(round);
}

}  // namespace topg
