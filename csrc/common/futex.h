// Functions to sleep on a 32-bit word that several processes share, and the rule for how long to
// spin before sleeping.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdint>

#include "common/deadline.h"
#include "common/error.h"

namespace adaptive {

static_assert(std::atomic<std::uint32_t>::is_always_lock_free &&
                  sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t),
              "a futex needs a plain 32-bit word");

// Sleeps while `word` equals `expected`, until another thread wakes this one, a signal arrives, or
// the deadline passes. Returns false only if the deadline passed. If it returns true, the caller
// must check its condition again.
inline bool futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected,
                       const Deadline& deadline) {
  const timespec until = deadline.as_timespec();
  const long result = ::syscall(SYS_futex, &word, FUTEX_WAIT_BITSET, expected, &until, nullptr,
                                FUTEX_BITSET_MATCH_ANY);
  if (result == 0 || errno == EAGAIN || errno == EINTR) {
    return true;
  }
  if (errno == ETIMEDOUT) {
    return false;
  }
  throw_errno("futex", "FUTEX_WAIT_BITSET");
}

// Wakes all threads that sleep on `word`, in any process. Never fails if the word is mapped.
inline void futex_wake_all(std::atomic<std::uint32_t>& word) noexcept {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

inline void relax_cpu() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

// Returns the number of CPUs that this process may run on, or 1 if the kernel does not report it.
inline unsigned allowed_cpus() noexcept {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof(set), &set) != 0) {
    return 1;
  }
  return static_cast<unsigned>(CPU_COUNT(&set));
}

// Determines how long a waiter spins before it sleeps, based on the success of earlier spins. A
// futex wake costs 20-46 us, so a spin of that length pays off if the other side runs on its own
// CPU. A long spin lasts as long as several wakes plus some work, so that it also succeeds if the
// peer slept. Otherwise, two processes that exchange messages would always make each other sleep.
// If both processes share a CPU, a spinner takes time from the process that it waits for. There are
// three cases: more busy processes than CPUs; a machine with other work, which only unsuccessful
// spins reveal; and a wake that put both processes on one CPU while another CPU is idle. Therefore
// a long spin yields periodically, which lets the peer run and makes the kernel move one of the
// processes.
class SpinBudget {
 public:
  // `local_processes` is the number of busy processes that share this node's CPUs.
  explicit SpinBudget(unsigned local_processes) noexcept
      : longest_(local_processes > allowed_cpus() ? kShortest : kLongest) {}

  // Spins until `ready()` is true or the spin limit is reached. Returns the last value of
  // `ready()`.
  template <typename Ready>
  bool spin_until(const Ready& ready) {
    const auto longest = short_spins_left_ > 0 ? kShortest : longest_;
    // Spin for a while before reading the clock and yielding, because these calls may take longer
    // than a message.
    const int first = longest > kShortest ? kFirstRounds : 1;
    for (int i = 0; i < first; ++i) {
      if (check_often(ready)) {
        return true;
      }
    }
    const auto end = Deadline::Clock::now() + longest;
    do {
      if (check_often(ready)) {
        return true;
      }
      if (longest > kShortest) {
        ::sched_yield();
      }
    } while (Deadline::Clock::now() < end);
    if (short_spins_left_ > 0) {
      --short_spins_left_;
    } else {
      // After an unsuccessful long spin, the next spins are short. The number of short spins
      // doubles with each unsuccessful long spin.
      penalty_ = std::clamp(2 * penalty_, 1, kLongestPenalty);
      short_spins_left_ = penalty_;
    }
    return ready();
  }

 private:
  template <typename Ready>
  bool check_often(const Ready& ready) {
    for (int i = 0; i < kChecksPerRound; ++i) {
      if (ready()) {
        penalty_ = 0;
        short_spins_left_ = 0;
        return true;
      }
      relax_cpu();
    }
    return false;
  }

  static constexpr std::chrono::nanoseconds kShortest = std::chrono::microseconds(2);
  static constexpr std::chrono::nanoseconds kLongest = std::chrono::microseconds(500);
  static constexpr int kFirstRounds = 8;
  static constexpr int kChecksPerRound = 32;
  static constexpr int kLongestPenalty = 64;

  std::chrono::nanoseconds longest_;
  int penalty_ = 0;
  int short_spins_left_ = 0;
};

// Sleeps until `ready()` is true or the deadline passes; returns the last value of `ready()`.
// `word` must change after every change that may make `ready()` true.
template <typename Ready>
bool sleep_until(std::atomic<std::uint32_t>& word, const Deadline& deadline, const Ready& ready) {
  for (;;) {
    const std::uint32_t seen = word.load();
    if (ready()) {
      return true;
    }
    if (deadline.expired()) {
      return false;
    }
    futex_wait(word, seen, deadline);
  }
}

}  // namespace adaptive
