// Tests of a channel over real verbs, in addition to channel_test.cc: its options, and the time at
// which slots are returned. Run as two ranks by tests/labs/rdma_lab; see tests/cpp_tests.py for the
// build. With an argument, only tests whose name contains it are run.
#include <deque>
#include <optional>
#include <random>
#include <vector>

#include "tests/rdma_lab.h"

namespace {

using namespace adaptive;           // NOLINT: a test
using namespace adaptive::testing;  // NOLINT

// Sizes near the sizes of slots and writes, and random sizes.
std::vector<std::size_t> sizes_for(std::size_t slot_bytes, std::size_t count) {
  std::vector<std::size_t> sizes{0,
                                 1,
                                 64,
                                 100,
                                 128,
                                 4096,
                                 slot_bytes - 1,
                                 slot_bytes,
                                 slot_bytes + 1,
                                 2 * slot_bytes,
                                 5 * slot_bytes + 17,
                                 40 * slot_bytes};
  std::mt19937 random(1);
  while (sizes.size() < count) {
    sizes.push_back(random() % (random() % 5 == 0 ? 4 * slot_bytes : slot_bytes));
  }
  return sizes;
}

void both_directions_at_once(Lab& lab, RdmaOptions options, std::size_t count) {
  // 1.1 s, because a node acknowledges only when its single processor is free
  options.ack_timeout = 18;
  End end = lab.open(options);
  const auto sizes = sizes_for(options.slot_bytes, count);
  std::size_t sent = 0;
  std::size_t received = 0;
  while (sent < sizes.size() || received < sizes.size()) {
    const bool sends = sent < sizes.size() && end.sender->pending() < 8;
    if (sends) {
      send_pattern(*end.sender, sizes[sent], static_cast<int>(sent));
      ++sent;
    }
    Completions& completions = *end.session.completions;
    if (auto item = sends ? completions.poll() : completions.wait(soon(5))) {
      const auto* const failure = std::get_if<Failure>(&*item);
      check(failure == nullptr, "an arrival, got: " + (failure ? failure->text : ""));
      check_arrival(std::get<Arrival>(*item), sizes[received], static_cast<int>(received));
      ++received;
    }
  }
  close(end);
  lab.meet();
}

void different_options_are_refused(Lab& lab) {
  check_throws<Error>([&] { lab.open(small_slots(4 + static_cast<unsigned>(lab.rank()))); },
                      "with slots ");
  lab.meet();
  RdmaOptions options = small_slots();
  if (lab.rank() == 1) {
    options.device = "rxe7";
  }
  check_throws<Error>([&] { lab.open(options); },
                      lab.rank() == 1
                          ? "there is no RDMA port of device 'rxe7'"
                          : "rank 1 cannot open an RDMA channel: there is no RDMA port");
  lab.meet();
}

// The sender sends its waiting messages even though the receiver does not poll.
void returned_slots_reach_the_sender_while_the_receiver_computes(Lab& lab) {
  const int slots = 4;
  End end = lab.open(small_slots(slots));
  if (lab.rank() == 0) {
    for (int number = 0; number < 2 * slots; ++number) {
      send_pattern(*end.sender, 100, number);
    }
    lab.meet();
    eventually([&] { return end.sender->pending() == 0; }, "everything to be with the peer");
    lab.meet();
  } else {
    std::vector<Arrival> held;
    for (int number = 0; number < slots; ++number) {
      held.push_back(take_arrival(end));
    }
    lab.meet();
    held.clear();
    lab.meet();
    for (int number = slots; number < 2 * slots; ++number) {
      check_arrival(take_arrival(end), 100, number);
    }
  }
  close(end);
  lab.meet();
}

// All slots except one are reserved. The peer waits for messages that never arrive, and learns only
// from a control word that this end needs slots.
void one_slot_carries_a_stream(Lab& lab, unsigned slots) {
  End end = lab.open(small_slots(slots));
  constexpr int kCount = 100;
  if (lab.rank() == 0) {
    send_pattern(*end.sender, 100, 0);
    lab.meet();
    std::vector<Reserved> parts;
    while (parts.size() + 1 < slots) {
      parts.push_back(std::move(end.sender->reserve(10).value()));
    }
    for (int number = 1; number < kCount; ++number) {
      send_pattern(*end.sender, 100, number);
    }
    check(end.sender->flush(patient()), "the messages to go out");
    lab.meet();
    std::optional<Reserved> part;
    eventually([&] { return (part = end.sender->reserve(10)).has_value(); }, "another part");
  } else {
    for (int number = 0; number < kCount; ++number) {
      check_arrival(take_arrival(end), 100, number);
      if (number == 0) {
        lab.meet();
      }
    }
    lab.meet();
  }
  close(end);
  lab.meet();
}

// The receiver holds all slots and returns one at a time. The sender needs this one slot for its
// last messages, so it must be returned immediately instead of with a quarter of the slots.
void a_full_receiver_returns_each_slot_at_once(Lab& lab) {
  constexpr int kSlots = 32;
  End end = lab.open(small_slots(kSlots));
  std::deque<Arrival> held;
  for (int number = 0; number < kSlots + 3; ++number) {
    if (lab.rank() == 0) {
      send_pattern(*end.sender, 100, number);
      continue;
    }
    if (held.size() == kSlots) {
      held.pop_front();
    }
    held.push_back(take_arrival(end));
    check_arrival(held.back(), 100, number);
  }
  lab.meet();
  held.clear();
  close(end);
  lab.meet();
}

RdmaOptions with(const std::function<void(RdmaOptions&)>& change) {
  RdmaOptions options = small_slots();
  change(options);
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  Lab lab;
  const LabTests test(lab, argc, argv);
  const RdmaOptions four_pairs = with([](auto& o) { o.num_qps = 4; });
  const RdmaOptions small_mtu = with([](auto& o) { o.mtu_bytes = 512; });
  const RdmaOptions many = with([](auto& o) {
    o.slots = 64;
    o.num_qps = 3;
  });
  test("both directions", [&] { both_directions_at_once(lab, small_slots(), 400); });
  test("both directions, one slot", [&] { both_directions_at_once(lab, small_slots(1), 300); });
  test("both directions, four queue pairs", [&] { both_directions_at_once(lab, four_pairs, 100); });
  test("both directions, MTU 512", [&] { both_directions_at_once(lab, small_mtu, 100); });
  test("both directions, default options", [&] { both_directions_at_once(lab, {}, 0); });
  test("both directions, 64 slots, three queue pairs",
       [&] { both_directions_at_once(lab, many, 400); });
  test("different options", [&] { different_options_are_refused(lab); });
  test("returns while computing",
       [&] { returned_slots_reach_the_sender_while_the_receiver_computes(lab); });
  test("one slot left of 4", [&] { one_slot_carries_a_stream(lab, 4); });
  test("one slot left of 32", [&] { one_slot_carries_a_stream(lab, 32); });
  test("a full receiver", [&] { a_full_receiver_returns_each_slot_at_once(lab); });
  return summary();
}
