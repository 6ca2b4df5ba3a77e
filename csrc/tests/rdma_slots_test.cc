// The slots of a channel over real verbs: taken, reserved and returned. Run as two ranks by
// tests/labs/rdma_lab and built as rdma_channel_test.cc. With an argument, only tests whose name
// contains it.
#include <chrono>
#include <cstring>
#include <deque>
#include <random>
#include <thread>

#include "tests/rdma_lab.h"

namespace {

using namespace adaptive;           // NOLINT: a test
using namespace adaptive::testing;  // NOLINT

void full_slots_hold_the_sender_back_without_blocking_it(Lab& lab) {
  const RdmaOptions options = small_slots();
  End end(lab, lab.next_port(), options);
  constexpr std::size_t kCount = 30;
  if (lab.rank() == 0) {
    for (std::size_t i = 0; i < kCount; ++i) {
      send(*end.sender, 1000, i);
    }
    check(end.sender->pending() >= kCount - options.slots, "most to wait for room");
    check(!end.sender->reserve(10).has_value(), "nothing to reserve now");
    check(!end.sender->flush(soon(50)), "no end of flushing without room");
    lab.meet();
    end.close();
    check(end.sender->pending() == 0, "nothing to wait");
  } else {
    lab.meet();
    std::deque<Arrival> held;
    for (std::size_t i = 0; i < options.slots; ++i) {
      held.push_back(next_arrival(*end.session.completions));
    }
    check(!end.session.completions->wait(soon(100)).has_value(), "no more than the slots hold");
    for (std::size_t i = 0; i < kCount; ++i) {
      check_arrival(held.front(), 1000, i);
      held.pop_front();
      if (i + options.slots < kCount) {
        held.push_back(next_arrival(*end.session.completions));
      }
    }
    end.close();
  }
  lab.meet();
}

void slots_come_back_in_any_order_from_any_thread(Lab& lab, unsigned slots) {
  RdmaOptions options = small_slots();
  options.slots = slots;
  End end(lab, lab.next_port(), options);
  constexpr std::size_t kCount = 400;
  if (lab.rank() == 0) {
    for (std::size_t i = 0; i < kCount; ++i) {
      send(*end.sender, 512 + i, i);
    }
  } else {
    std::mt19937 random(2);
    std::vector<std::pair<Arrival, std::size_t>> held;
    for (std::size_t i = 0; i < kCount; ++i) {
      held.emplace_back(next_arrival(*end.session.completions), i);
      while (held.size() >= slots || (i + 1 == kCount && !held.empty())) {
        std::swap(held[random() % held.size()], held.back());
        auto [arrival, sequence] = std::move(held.back());
        held.pop_back();
        check_arrival(arrival, 512 + sequence, sequence);
        std::thread([returned = std::move(arrival.payload)]() mutable {
          const Lease gone = std::move(returned);
        }).join();
      }
    }
  }
  end.close();
  lab.meet();
}

void returned_slots_reach_the_sender_while_the_receiver_computes(Lab& lab) {
  const RdmaOptions options = small_slots();
  End end(lab, lab.next_port(), options);
  if (lab.rank() == 0) {
    for (std::size_t i = 0; i < 2 * options.slots; ++i) {
      send(*end.sender, 100, i);
    }
    lab.meet();
    // The peer does not look into its completions meanwhile.
    eventually([&] { return end.sender->pending() == 0; }, "everything to be with the peer");
    lab.meet();
  } else {
    std::vector<Arrival> held;
    for (std::size_t i = 0; i < options.slots; ++i) {
      held.push_back(next_arrival(*end.session.completions));
    }
    lab.meet();
    held.clear();
    lab.meet();
    for (std::size_t i = options.slots; i < 2 * options.slots; ++i) {
      check_arrival(next_arrival(*end.session.completions), 100, i);
    }
  }
  end.close();
  lab.meet();
}

void reserved_parts_are_sent_without_a_copy(Lab& lab) {
  const RdmaOptions options = small_slots();
  End end(lab, lab.next_port(), options);
  constexpr std::size_t kCount = 50;
  if (lab.rank() == 0) {
    for (std::size_t i = 0; i < kCount; ++i) {
      std::optional<Reserved> part;
      eventually([&] { return (part = end.sender->reserve(3000)).has_value(); }, "room");
      check(part->memory.size_bytes() == 3000, "the size asked for");
      check(reinterpret_cast<std::uintptr_t>(part->memory.data()) % 64 == 0, "alignment");
      if (i % 5 == 0) {
        continue;  // given up
      }
      fill(part->memory.data(), 3000, i - i / 5 - 1);
      const auto sequence = i - i / 5 - 1;
      end.sender->commit(message_of(3000, sequence), std::move(*part));
    }
    // Memory that is still held is not used again, and a second commit of it is refused.
    std::optional<Reserved> part;
    eventually([&] { return (part = end.sender->reserve(64)).has_value(); }, "room");
    const std::uint64_t token = part->token;
    Lease kept = std::move(part->memory);
    fill(kept.data(), 64, 40);
    const std::vector<std::byte> filled(kept.data(), kept.data() + 64);
    end.sender->commit(message_of(64, 40), Reserved{Lease(), token});
    for (std::size_t i = 41; i < 60; ++i) {
      send(*end.sender, 64, i);
      check(std::memcmp(kept.data(), filled.data(), 64) == 0, "held memory unchanged");
    }
    check_throws<Error>([&] { end.sender->commit(message_of(64, 60), Reserved{Lease(), 4096}); },
                        "no part that this channel has reserved");
    check(!end.sender->reserve(options.slot_bytes + 1).has_value(), "no part above a slot");
  } else {
    for (std::size_t i = 0; i < 60; ++i) {
      check_arrival(next_arrival(*end.session.completions), i < 40 ? 3000 : 64, i);
    }
  }
  end.close();
  lab.meet();
}

// The peer has returned a slot, but holds that back: nothing told it that this end is short of
// them.
void reserved_parts_do_not_stop_what_is_sent(Lab& lab) {
  const RdmaOptions options = small_slots();
  End end(lab, lab.next_port(), options);
  if (lab.rank() == 0) {
    send(*end.sender, 100, 0);
    lab.meet();
    std::vector<Reserved> parts;
    while (parts.size() + 1 < options.slots) {
      parts.push_back(std::move(end.sender->reserve(10).value()));
    }
    send(*end.sender, 100, 1);
    eventually([&] { return end.sender->pending() == 0; }, "the message to go out");
    lab.meet();
    std::optional<Reserved> part;
    eventually([&] { return (part = end.sender->reserve(10)).has_value(); }, "another part");
  } else {
    check_arrival(next_arrival(*end.session.completions), 100, 0);
    lab.meet();
    check_arrival(next_arrival(*end.session.completions), 100, 1);
    lab.meet();
  }
  end.close();
  lab.meet();
}

// All but one are reserved: what the peer may think is under way never comes to it.
void one_slot_carries_a_stream(Lab& lab) {
  RdmaOptions options = small_slots();
  options.slots = 32;
  End end(lab, lab.next_port(), options);
  constexpr std::size_t kCount = 100;
  if (lab.rank() == 0) {
    std::vector<Reserved> parts;
    while (parts.size() + 1 < options.slots) {
      parts.push_back(std::move(end.sender->reserve(10).value()));
    }
    for (std::size_t i = 0; i < kCount; ++i) {
      send(*end.sender, 100, i);
    }
    check(end.sender->flush(patient()), "the messages to go out");
    lab.meet();
  } else {
    for (std::size_t i = 0; i < kCount; ++i) {
      check_arrival(next_arrival(*end.session.completions), 100, i);
    }
    lab.meet();
  }
  end.close();
  lab.meet();
}

// The last return that the peer can make brings the last message, though it is no quarter of all.
void a_full_receiver_returns_each_slot_at_once(Lab& lab) {
  RdmaOptions options = small_slots();
  options.slots = 32;
  End end(lab, lab.next_port(), options);
  const std::size_t count = options.slots + 3;
  if (lab.rank() == 0) {
    for (std::size_t i = 0; i < count; ++i) {
      send(*end.sender, 100, i);
    }
    lab.meet();
  } else {
    std::deque<Arrival> held;
    for (std::size_t i = 0; i < count; ++i) {
      if (held.size() == options.slots) {
        held.pop_front();
      }
      held.push_back(next_arrival(*end.session.completions));
      check_arrival(held.back(), 100, i);
    }
    lab.meet();
  }
  end.close();
  lab.meet();
}

}  // namespace

int main(int argc, char** argv) {
  Lab lab;
  const LabTests test(lab, argc, argv);
  test("back-pressure", [&] { full_slots_hold_the_sender_back_without_blocking_it(lab); });
  for (unsigned slots : {2U, 5U, 64U}) {
    test("out-of-order returns, " + std::to_string(slots) + " slots",
         [&] { slots_come_back_in_any_order_from_any_thread(lab, slots); });
  }
  test("returns while computing",
       [&] { returned_slots_reach_the_sender_while_the_receiver_computes(lab); });
  test("reserve and commit", [&] { reserved_parts_are_sent_without_a_copy(lab); });
  test("reserve and send", [&] { reserved_parts_do_not_stop_what_is_sent(lab); });
  test("one slot left", [&] { one_slot_carries_a_stream(lab); });
  test("a full receiver", [&] { a_full_receiver_returns_each_slot_at_once(lab); });
  return summary();
}
