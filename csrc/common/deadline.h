// A point in time after which a wait gives up. Every blocking function of the core has a deadline.
#pragma once

#include <sys/types.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>

namespace adaptive {

// Called about every 100 ms and after signals while a function waits; may throw to end it.
using Tick = std::function<void()>;

class Deadline {
 public:
  // steady_clock is CLOCK_MONOTONIC on Linux, which is also the clock of futexes.
  using Clock = std::chrono::steady_clock;

  static Deadline after(std::chrono::nanoseconds wait) { return Deadline(Clock::now() + wait); }

  static Deadline at(Clock::time_point when) { return Deadline(when); }

  // Returns the earlier of this deadline and now + `slice`, for waits that do other work
  // periodically.
  Deadline at_most(std::chrono::nanoseconds slice) const {
    return Deadline(std::min(when_, Clock::now() + slice));
  }

  bool expired() const { return Clock::now() >= when_; }

  // Remaining time in whole milliseconds, rounded up so that poll() does not spin just before the
  // deadline.
  int remaining_ms() const {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(when_ - Clock::now()).count();
    return static_cast<int>(std::clamp<std::int64_t>(left, 0, 1'000'000'000));
  }

  timespec as_timespec() const {
    const auto since_epoch = when_.time_since_epoch();
    const auto whole_s = std::chrono::duration_cast<std::chrono::seconds>(since_epoch);
    const auto rest_ns = std::chrono::nanoseconds(since_epoch - whole_s);
    timespec result{};
    result.tv_sec = static_cast<time_t>(whole_s.count());
    result.tv_nsec = static_cast<long>(rest_ns.count());
    return result;
  }

 private:
  explicit Deadline(Clock::time_point when) : when_(when) {}

  Clock::time_point when_;
};

}  // namespace adaptive
