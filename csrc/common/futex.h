// Sleeping on a 32-bit word that several processes share, and how long to spin before that.
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

// Sleeps while `word` holds `expected`, until woken, interrupted or past the deadline. Returns
// false only when the deadline passed; after true the caller looks at its condition again.
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

// Wakes everybody who sleeps on `word`, in any process. Never fails on a mapped word.
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

// Number of CPUs this process may run on; 1 when the kernel does not tell.
inline unsigned allowed_cpus() noexcept {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof(set), &set) != 0) {
    return 1;
  }
  return static_cast<unsigned>(CPU_COUNT(&set));
}

// How long one waiter spins before it sleeps, learnt from how its spins end. A futex wake costs
// 20-46 us, so a spin of that order pays while the other side runs on a CPU of its own. A long spin
// takes several wakes and some work, so that it also meets a peer that slept: two that exchange
// messages would else send each other to sleep for ever. Where both share a CPU, a spinner takes
// the time of the one it waits for: always so with more busy processes than CPUs, at times so on a
// machine with other work, which only failing spins tell; and where a wake put both on one CPU with
// another one idle. A long spin therefore yields now and then: that lets the peer run, and shows
// the kernel two that could run where one can, which it mends.
class SpinBudget {
 public:
  // local_processes is how many busy processes share this node's CPUs.
  explicit SpinBudget(unsigned local_processes) noexcept
      : longest_(local_processes > allowed_cpus() ? kShortest : kLongest) {}

  // Spins until `ready()` or for as long as seems worth it. Returns the last answer of `ready()`.
  template <typename Ready>
  bool spin_until(const Ready& ready) {
    const auto longest = short_spins_left_ > 0 ? kShortest : longest_;
    // For a while before the clock is asked and others are let run: where these are slow system
    // calls they take longer than a message.
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
      // A long spin in vain: the next ones are short, twice as many each time.
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

// Sleeps until `ready()` or the deadline; returns the last answer of `ready()`. `word` has to
// change after anything that may make `ready()` true.
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
