#include "shm/distance.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>

#include "common/futex.h"

namespace adaptive::shm {
namespace {

using Clock = Deadline::Clock;

// The distance is measured in several short series. The result is that of the fastest series, which
// other work on the processors disturbed least.
constexpr std::uint64_t kRounds = 64;
constexpr int kSeries = 8;
// Time limit of the measurement: a few time slices of a busy machine, so that both processes run at
// the same time at least once.
constexpr auto kLongest = std::chrono::milliseconds(30);
// Flag in the leader's last value. The other bits of this value are the result in picoseconds.
constexpr std::uint64_t kLast = 1ULL << 63;
constexpr std::uint64_t kNone = kLast - 1;

bool await(const std::atomic<std::uint64_t>& word, std::uint64_t value,
           Clock::time_point end) noexcept {
  for (unsigned i = 1; word.load(std::memory_order_acquire) != value; ++i) {
    relax_cpu();
    if (i % 64 == 0 && Clock::now() > end) {
      return false;
    }
  }
  return true;
}

double lead(Control* control, Clock::time_point end) noexcept {
  double best_ns = std::numeric_limits<double>::infinity();
  std::uint64_t value = 0;
  bool answered = true;
  for (int series = 0; series < kSeries && answered; ++series) {
    const auto start = Clock::now();
    for (std::uint64_t round = 0; round < kRounds && answered; ++round) {
      control->ping.value.store(++value, std::memory_order_release);
      answered = await(control->pong.value, value, end);
    }
    const std::chrono::duration<double, std::nano> taken = Clock::now() - start;
    // the first series includes the wait for the follower's start
    if (answered && series > 0) {
      best_ns = std::min(best_ns, taken.count() / (2.0 * kRounds));
    }
  }
  const bool known = answered && best_ns < 1e6;
  const std::uint64_t result = known ? static_cast<std::uint64_t>(best_ns * 1e3) : kNone;
  control->ping.value.store(kLast | result, std::memory_order_release);
  return known ? best_ns : -1.0;
}

double follow(Control* control, Clock::time_point end) noexcept {
  std::uint64_t last = 0;
  for (unsigned i = 1;; ++i) {
    const std::uint64_t value = control->ping.value.load(std::memory_order_acquire);
    if ((value & kLast) != 0) {
      const std::uint64_t result = value & ~kLast;
      return result == kNone ? -1.0 : static_cast<double>(result) / 1e3;
    }
    if (value != last) {
      last = value;
      control->pong.value.store(value, std::memory_order_release);
    } else {
      relax_cpu();
    }
    if (i % 64 == 0 && Clock::now() > end) {
      return -1.0;
    }
  }
}

}  // namespace

double measure_distance_ns(Control* control, bool leader) noexcept {
  const auto end = Clock::now() + kLongest;
  // The follower waits longer, so that it answers for as long as the leader measures.
  return leader ? lead(control, end) : follow(control, end + kLongest);
}

}  // namespace adaptive::shm
