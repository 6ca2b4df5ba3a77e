// Tests of the bell and of the queue that waits on it.
#include "common/completions.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "common/error.h"
#include "tests/pair.h"

namespace adaptive::testing {
namespace {

using std::chrono::milliseconds;

std::uint64_t posted(const std::optional<Item>& item) {
  check(item && std::holds_alternative<Posted>(*item), "a posted item");
  return std::get<Posted>(*item).item;
}

// Two threads pass a number back and forth. If a ring is lost, the test hangs.
void exchange_rings(unsigned local_processes) {
  Completions ping(local_processes);
  Completions pong(local_processes);
  constexpr std::uint64_t kRounds = 20'000;
  std::thread other([&] {
    for (std::uint64_t i = 0; i < kRounds; ++i) {
      pong.put(Posted{posted(ping.wait(patient())) + 1});
    }
  });
  for (std::uint64_t i = 0; i < kRounds; ++i) {
    ping.put(Posted{i});
    check(posted(pong.wait(patient())) == i + 1, "the answer");
  }
  other.join();
}

TEST(no_ring_is_lost) {
  exchange_rings(100'000);  // busy CPUs: no spinning
  exchange_rings(1);        // adaptive spinning
}

// The flag is set by a plain store before the ring, as a peer does.
TEST(a_bell_rings_in_another_process) {
  Bell mine;
  Bell theirs;
  const MappedRegion flag = [] {
    const ScopedFd fd(::memfd_create("flag", MFD_CLOEXEC));
    check(::ftruncate(fd.get(), 4096) == 0, "ftruncate");
    return MappedRegion::shared(fd.get(), 4096);
  }();
  auto& turn = *reinterpret_cast<std::atomic<std::uint32_t>*>(flag.data());
  const auto wait_for = [&turn](Bell& bell, std::uint32_t value) {
    while (turn.load(std::memory_order_acquire) != value) {
      const std::uint32_t announced = bell.announce_sleep();
      if (turn.load(std::memory_order_acquire) != value) {
        bell.sleep(announced, patient());
      }
      bell.end_sleep();
    }
  };
  constexpr std::uint32_t kRounds = 5000;
  Child child([&] {
    Bell to_parent = Bell::attach(ScopedFd(::dup(mine.fd())));
    for (std::uint32_t i = 0; i < kRounds; ++i) {
      wait_for(theirs, 2 * i + 1);
      turn.store(2 * i + 2, std::memory_order_release);
      to_parent.ring();
    }
  });
  Bell to_child = Bell::attach(ScopedFd(::dup(theirs.fd())));
  for (std::uint32_t i = 0; i < kRounds; ++i) {
    turn.store(2 * i + 1, std::memory_order_release);
    to_child.ring();
    wait_for(mine, 2 * i + 2);
  }
  child.join();
}

TEST(foreign_descriptors_are_no_bells) {
  check_throws<Error>([] { Bell::attach(ScopedFd(::open("/dev/null", O_RDWR))); }, "sealed");
  const ScopedFd fd(::memfd_create("x", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  check(::ftruncate(fd.get(), ::sysconf(_SC_PAGESIZE)) == 0, "ftruncate");
  check(::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0, "seals");
  check_throws<Error>([&] { Bell::attach(ScopedFd(::dup(fd.get()))); }, "other bytes");
}

TEST(waits_end_with_their_deadline) {
  Completions completions(1);
  const auto start = Deadline::Clock::now();
  check(!completions.poll() && !completions.wait(soon(30)), "nothing");
  check(Deadline::Clock::now() - start >= milliseconds(29), "the time it was given");
  completions.put(Posted{1});
  check(posted(completions.wait(Deadline::after(milliseconds(0)))) == 1, "what is there is given");
}

TEST(waits_end_to_look_up) {
  Completions completions(1);
  const Deadline far = patient();
  check(!completions.wait(far, milliseconds(5)) && !far.expired(), "nothing, before the deadline");
  completions.put(Posted{1});
  check(posted(completions.wait(far, milliseconds(5))) == 1, "what is there is given");
  const Joined late([&] {
    ::usleep(20'000);
    completions.put(Posted{2});
  });
  check(posted(completions.wait(far, std::chrono::hours(1))) == 2, "what comes wakes it");
}

// A source that a thread fills.
struct Counter final : Source {
  bool poll(Completions& into) noexcept override {
    bool any = false;
    for (; given < wanted.load(std::memory_order_acquire); ++given) {
      into.found(Posted{given});
      any = true;
    }
    return any;
  }
  void arm() noexcept override { armed.fetch_add(1); }

  std::atomic<std::uint64_t> wanted{0};
  std::atomic<int> armed{0};
  std::uint64_t given = 0;
};

TEST(sources_are_polled_in_order_with_what_is_put) {
  Completions completions(100'000);
  auto source = std::make_shared<Counter>();
  completions.add(source);
  constexpr std::uint64_t kCount = 20'000;
  std::thread filler([&] {
    for (std::uint64_t i = 1; i <= kCount; ++i) {
      source->wanted.store(i, std::memory_order_release);
      completions.bell().ring();
      if (i % 64 == 0) {
        completions.drain_sources();
      }
    }
  });
  for (std::uint64_t i = 0; i < kCount; ++i) {
    check(posted(completions.wait(patient())) == i, "each once, in order");
  }
  filler.join();
  check(!completions.wait(soon(10)) && source->armed.load() > 0, "armed before sleep");
  completions.remove(source.get());
  source->wanted.store(kCount + 1);
  check(!completions.poll(), "not polled any more");
  check(source.use_count() == 1, "let go of");
}

}  // namespace
}  // namespace adaptive::testing
