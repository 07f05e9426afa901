// How long each step takes, when asked for.
#pragma once

#include <chrono>
#include <vector>

namespace topg {

// Seconds of one thread, by step of the program, and at barriers.
struct alignas(128) ThreadProfile {
  std::vector<double> steps;
  double waiting = 0;
};

using Profile = std::vector<ThreadProfile>;  // by thread

// Adds the time since the last call to where it belongs; without a profile it does nothing.
class StepClock {
 public:
  explicit StepClock(ThreadProfile* profile) : profile_(profile) {
    if (profile_ != nullptr) last_ = Clock::now();
  }
  void step_done(size_t step) {
    if (profile_ != nullptr) profile_->steps[step] += lap();
  }
  void wait_done() {
    if (profile_ != nullptr) profile_->waiting += lap();
  }

 private:
  using Clock = std::chrono::steady_clock;

  double lap() {
    const Clock::time_point now = Clock::now();
    const double seconds = std::chrono::duration<double>(now - last_).count();
    last_ = now;
    return seconds;
  }

  ThreadProfile* profile_;
  Clock::time_point last_;
};

}  // namespace topg
