// Tests of the bell, of the queue that waits on it, and of the loopback channel. Build: see
// tests/test_extension.py.
#include "common/completions.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "common/error.h"
#include "common/fork_guard.h"
#include "common/loopback.h"
#include "tests/pair.h"

namespace adaptive::testing {
namespace {

using std::chrono::milliseconds;

std::uint64_t posted(const std::optional<Item>& item) {
  check(item && std::holds_alternative<Posted>(*item), "a posted item");
  return std::get<Posted>(*item).item;
}

// Two threads hand a number to and fro; a ring that gets lost is a hang.
void no_ring_is_lost(double spin_us) {
  Completions ping(2, spin_us);
  Completions pong(2, spin_us);
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

// What makes the flag true is a plain store before the ring, as a peer's would be.
void a_bell_rings_in_another_process() {
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

void foreign_descriptors_are_no_bells() {
  check_throws<Error>([] { Bell::attach(ScopedFd(::open("/dev/null", O_RDWR))); }, "sealed");
  const ScopedFd fd(::memfd_create("x", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  check(::ftruncate(fd.get(), ::sysconf(_SC_PAGESIZE)) == 0, "ftruncate");
  check(::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0, "seals");
  check_throws<Error>([&] { Bell::attach(ScopedFd(::dup(fd.get()))); }, "other bytes");
}

void waits_end_with_their_deadline() {
  Completions completions(1);
  const auto start = Deadline::Clock::now();
  check(!completions.poll() && !completions.wait(soon(30)), "nothing");
  check(Deadline::Clock::now() - start >= milliseconds(29), "the time it was given");
  completions.put(Posted{1});
  check(posted(completions.wait(Deadline::after(milliseconds(0)))) == 1, "what is there is given");
}

void waits_end_to_look_up() {
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

void an_interrupt_ends_one_wait() {
  Completions completions(1);
  std::thread other([&] {
    ::usleep(20'000);
    completions.interrupt();
  });
  check(!completions.wait(patient()), "nothing");
  other.join();
  completions.put(Posted{3});
  check(posted(completions.wait(patient())) == 3, "the next wait waits again");
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

void sources_are_polled_in_order_with_what_is_put() {
  Completions completions(2, 5.0);
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

void a_fork_is_told_apart() {
  const ForkGuard guard;
  check(guard.in_maker(), "the maker");
  Child child([&] { check(!guard.in_maker(), "the child"); });
  child.join();
  check(guard.in_maker(), "still the maker");
}

// ---- Loopback

struct Loop {
  explicit Loop(const LoopbackOptions& options) : end{make_session(0), nullptr} {
    end.sender = open_loopback(end.session, options);
  }
  End end;
};

LoopbackOptions loop_options(unsigned slots = 3, std::size_t slot_bytes = 1000) {
  LoopbackOptions options;
  options.slots = slots;
  options.slot_bytes = slot_bytes;
  return options;
}

void loopback_keeps_the_rules() {
  Loop loop(loop_options());
  const std::vector<std::size_t> sizes{0, 1, 999, 1000, 1001, 50'000};
  for (int number = 0; number < 60; ++number) {
    send_pattern(*loop.end.sender, sizes[static_cast<std::size_t>(number) % 6], number);
  }
  check(loop.end.sender->pending() == 57, "three messages out");
  check(!loop.end.sender->flush(soon()), "not flushed");
  for (int number = 0; number < 60; ++number) {
    check_arrival(take_arrival(loop.end), sizes[static_cast<std::size_t>(number) % 6], number);
  }
  check(loop.end.sender->flush(patient()) && loop.end.sender->pending() == 0, "flushed");
}

void loopback_reserves() {
  Loop loop(loop_options(2));
  auto first = loop.end.sender->reserve(10);
  auto second = loop.end.sender->reserve(10);
  check(first && second && !loop.end.sender->reserve(10), "two slots");
  const Bytes bytes = pattern(10, 1);
  std::memcpy(first->memory.data(), bytes.data(), bytes.size());
  send_pattern(*loop.end.sender, 20, 0);
  const std::uint64_t token = first->token;
  loop.end.sender->commit(message_of(10, 1), std::move(*first));
  second.reset();
  check_arrival(take_arrival(loop.end), 20, 0);
  check_arrival(take_arrival(loop.end), 10, 1);
  check_throws<Error>([&] { loop.end.sender->commit(message_of(10, 1), {Lease(), token}); },
                      "no reservation");
  loop.end.sender->close();
  check_throws<Error>([&] { send_pattern(*loop.end.sender, 20, 0); }, "is closed");
}

void loopback_views_outlive_it() {
  Arrival held;
  {
    Loop loop(loop_options());
    send_pattern(*loop.end.sender, 100, 1);
    send_pattern(*loop.end.sender, 100, 2);
    held = take_arrival(loop.end);
  }
  check_arrival(held, 100, 1);
}

}  // namespace
}  // namespace adaptive::testing

int main() {
  using namespace adaptive::testing;
  run("rings, sleeping", [] { no_ring_is_lost(0.0); });
  run("rings, short spin", [] { no_ring_is_lost(1.0); });
  run("rings, learnt spin", [] { no_ring_is_lost(-1.0); });
  run("bell, processes", a_bell_rings_in_another_process);
  run("bell, foreign", foreign_descriptors_are_no_bells);
  run("deadline", waits_end_with_their_deadline);
  run("deadline, slices", waits_end_to_look_up);
  run("interrupt", an_interrupt_ends_one_wait);
  run("sources", sources_are_polled_in_order_with_what_is_put);
  run("fork", a_fork_is_told_apart);
  run("loopback", loopback_keeps_the_rules);
  run("loopback, reserve", loopback_reserves);
  run("loopback, views", loopback_views_outlive_it);
  return summary();
}
