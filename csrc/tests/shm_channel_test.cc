// Tests of shared memory channels, most with both ends in this process. Build: see
// tests/test_extension.py.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <mutex>
#include <random>
#include <thread>

#include "common/copy.h"
#include "common/error.h"
#include "shm/channel.h"
#include "tests/pair.h"

namespace adaptive::testing {
namespace {

ShmOptions small_slots(unsigned slots = 4, std::size_t slot_bytes = 4096) {
  ShmOptions options;
  options.slots = slots;
  options.slot_bytes = slot_bytes;
  return options;
}

Open opening(const ShmOptions& options) {
  return [options](const Session& session, Link link) {
    return open_shm(session, std::move(link), options, patient(), {});
  };
}

std::pair<End, End> open_two(const ShmOptions& options = small_slots()) {
  return open_pair(opening(options), opening(options));
}

const std::vector<std::size_t> kSizes{0,    1,    7,    64,    1000,  4095,   4096,
                                      4097, 8192, 9999, 20000, 65536, 1 << 20};

void messages_of_any_size_arrive_in_order(const ShmOptions& options) {
  auto ends = open_two(options);
  End& low = ends.first;
  End& high = ends.second;
  std::thread sender([&end = low] {
    int number = 0;
    for (int round = 0; round < 5; ++round) {
      for (const std::size_t size : kSizes) {
        send_pattern(*end.sender, size, number++);
      }
    }
    check(end.sender->flush(patient()), "everything sent");
  });
  int number = 0;
  for (int round = 0; round < 5; ++round) {
    for (const std::size_t size : kSizes) {
      check_arrival(take_arrival(high), size, number);
      ++number;
    }
  }
  sender.join();
  check(low.sender->pending() == 0, "nothing pending");
}

void both_directions_at_once() {
  auto ends = open_two();
  End& low = ends.first;
  End& high = ends.second;
  const auto talk = [](End& end, End&) {
    for (int number = 0; number < 2000; ++number) {
      send_pattern(*end.sender, static_cast<std::size_t>(number) * 7 % 9000, number);
      if (number >= 10) {
        check_arrival(take_arrival(end), static_cast<std::size_t>(number - 10) * 7 % 9000,
                      number - 10);
      }
    }
    for (int number = 1990; number < 2000; ++number) {
      check_arrival(take_arrival(end), static_cast<std::size_t>(number) * 7 % 9000, number);
    }
    check(end.sender->flush(patient()), "everything sent");
  };
  std::exception_ptr thrown;
  std::thread other([&] {
    try {
      talk(low, high);
    } catch (...) {
      thrown = std::current_exception();
    }
  });
  talk(high, low);
  other.join();
  if (thrown) {
    std::rethrow_exception(thrown);
  }
}

// send() returns although nobody takes anything, and what it kept is let go of afterwards.
void sending_never_waits_for_the_peer() {
  auto ends = open_two();
  End& low = ends.first;
  End& high = ends.second;
  std::vector<std::weak_ptr<Bytes>> kept;
  for (int number = 0; number < 50; ++number) {
    auto bytes = std::make_shared<Bytes>(pattern(3000, static_cast<unsigned>(number)));
    kept.push_back(bytes);
    send(*low.sender, std::move(bytes), number);
  }
  check(low.sender->pending() == 46, "all but four messages waiting");
  check(kept[3].expired() && !kept[4].expired(), "only what waits is kept");
  check(!low.sender->flush(soon()), "not flushed");
  for (int number = 0; number < 50; ++number) {
    check_arrival(take_arrival(high), 3000, number);
  }
  check(low.sender->flush(patient()), "flushed");
  eventually([&] { return kept.back().expired(); }, "memory let go of");
}

void slots_come_back_in_any_order_from_any_thread() {
  auto ends = open_two(small_slots(8));
  End& low = ends.first;
  End& high = ends.second;
  constexpr int kCount = 4000;
  std::mutex mutex;
  std::deque<Arrival> held;
  std::atomic<bool> done{false};
  std::vector<std::thread> droppers;
  for (unsigned i = 0; i < 3; ++i) {
    droppers.emplace_back([&, i] {
      std::mt19937 random(i);
      for (bool last = false; !last;) {
        last = done.load();
        std::vector<Arrival> mine;
        {
          const std::lock_guard<std::mutex> lock(mutex);
          while (!held.empty()) {
            const std::size_t index = random() % held.size();
            mine.push_back(std::move(held[index]));
            held.erase(held.begin() + static_cast<std::ptrdiff_t>(index));
          }
        }
        for (const Arrival& arrival : mine) {
          check_arrival(arrival, 100, arrival.message.microbatch);
        }
      }
    });
  }
  std::thread sender([&end = low] {
    for (int number = 0; number < kCount; ++number) {
      send_pattern(*end.sender, 100, number);
    }
    check(end.sender->flush(patient()), "everything sent");
  });
  for (int number = 0; number < kCount; ++number) {
    Arrival arrival = take_arrival(high);
    check(arrival.message.microbatch == number, "the order of sending");
    const std::lock_guard<std::mutex> lock(mutex);
    held.push_back(std::move(arrival));
  }
  done.store(true);
  sender.join();
  for (auto& dropper : droppers) {
    dropper.join();
  }
}

void a_slow_receiver_sees_what_was_sent_not_what_came_later() {
  auto ends = open_two(small_slots(2));
  End& low = ends.first;
  End& high = ends.second;
  send_pattern(*low.sender, 500, 0);
  const Arrival first = take_arrival(high);
  for (int number = 1; number < 20; ++number) {
    send_pattern(*low.sender, 500, number);
    check_arrival(take_arrival(high), 500, number);
  }
  check_arrival(first, 500, 0);
}

void reserved_memory_is_handed_over_without_a_copy() {
  auto ends = open_two(small_slots(2));
  End& low = ends.first;
  End& high = ends.second;
  auto reserved = low.sender->reserve(1000);
  check(reserved.has_value(), "room");
  check(reinterpret_cast<std::uintptr_t>(reserved->memory.data()) % 64 == 0, "alignment");
  const Bytes bytes = pattern(1000, 5);
  std::memcpy(reserved->memory.data(), bytes.data(), bytes.size());
  low.sender->commit(message_of(1000, 5), std::move(*reserved));
  check_arrival(take_arrival(high), 1000, 5);
  check(!low.sender->reserve(4097).has_value(), "no room for more than a slot");
}

void a_reserved_slot_waits_for_both_ends() {
  auto ends = open_two(small_slots(1));
  End& low = ends.first;
  End& high = ends.second;
  auto reserved = low.sender->reserve(10);
  check(!low.sender->reserve(10).has_value(), "one slot only");
  Lease view = std::move(reserved->memory);
  const Bytes bytes = pattern(10, 1);
  std::memcpy(view.data(), bytes.data(), bytes.size());
  low.sender->commit(message_of(10, 1), Reserved{Lease(), reserved->token});
  {
    check_arrival(take_arrival(high), 10, 1);
  }
  check(!low.sender->reserve(10).has_value(), "still looked at by the sender");
  send_pattern(*low.sender, 20, 2);
  check(low.sender->pending() == 1, "no slot for the next message");
  std::thread([&view] { const Lease dropped = std::move(view); }).join();
  check_arrival(take_arrival(high), 20, 2);
}

void dropped_reservations_come_back() {
  auto ends = open_two(small_slots(2));
  End& low = ends.first;
  End& high = ends.second;
  for (int i = 0; i < 10; ++i) {
    auto first = low.sender->reserve(10);
    auto second = low.sender->reserve(10);
    check(first && second && !low.sender->reserve(10), "two slots, again and again");
  }
  auto reserved = low.sender->reserve(10);
  const std::uint64_t token = reserved->token;
  reserved.reset();
  check_throws<Error>([&] { low.sender->commit(message_of(10, 0), Reserved{Lease(), token}); },
                      "was not reserved");
  auto again = low.sender->reserve(10);
  check_throws<Error>([&] { low.sender->commit(message_of(10, 0), Reserved{Lease(), token}); },
                      "was not reserved");
  check_throws<Error>([&] { low.sender->commit(message_of(9999, 0), std::move(*again)); },
                      "does not fit");
  send_pattern(*low.sender, 5, 0);
  check_arrival(take_arrival(high), 5, 0);
}

void committed_messages_keep_their_place_behind_waiting_ones() {
  auto ends = open_two(small_slots(3));
  End& low = ends.first;
  End& high = ends.second;
  auto reserved = low.sender->reserve(100);
  for (int number = 0; number < 6; ++number) {
    send_pattern(*low.sender, 100, number);
  }
  const Bytes bytes = pattern(100, 6);
  std::memcpy(reserved->memory.data(), bytes.data(), bytes.size());
  low.sender->commit(message_of(100, 6), std::move(*reserved));
  send_pattern(*low.sender, 100, 7);
  for (int number = 0; number < 8; ++number) {
    check_arrival(take_arrival(high), 100, number);
  }
}

// Pieces move while the receiver's process does something else.
void large_messages_arrive_while_the_receiver_computes() {
  auto ends = open_two(small_slots(2));
  End& low = ends.first;
  End& high = ends.second;
  auto bytes = std::make_shared<Bytes>(pattern(1 << 20, 1));
  const std::weak_ptr<Bytes> kept = bytes;
  send(*low.sender, std::move(bytes), 1);
  eventually([&] { return kept.expired(); }, "the message gone out with nobody waiting for it");
  check_arrival(take_arrival(high), 1 << 20, 1);
}

void assembled_messages_are_bounded_by_the_slots() {
  auto ends = open_two(small_slots(2));
  End& low = ends.first;
  End& high = ends.second;
  for (int number = 0; number < 6; ++number) {
    send_pattern(*low.sender, 10'000, number);
  }
  eventually([&] { return low.sender->pending() <= 4; }, "two messages through");
  ::usleep(20'000);
  check(low.sender->pending() >= 3, "no more than two messages and the slots taken");
  std::vector<Arrival> held;
  held.push_back(take_arrival(high));
  held.push_back(take_arrival(high));
  check(!high.session.completions->wait(soon()).has_value(), "no third before one is dropped");
  std::thread dropper([first = std::move(held[0])]() mutable {
    ::usleep(10'000);
    first = Arrival();
  });
  Arrival third = take_arrival(high);
  dropper.join();
  held.clear();
  for (int number = 3; number < 6; ++number) {
    check_arrival(take_arrival(high), 10'000, number);
  }
  check_arrival(third, 10'000, 2);
}

void views_outlive_the_channel() {
  Arrival arrival;
  std::optional<Reserved> reserved;
  {
    auto ends = open_two();
    End& low = ends.first;
    End& high = ends.second;
    send_pattern(*low.sender, 3000, 4);
    arrival = take_arrival(high);
    reserved = low.sender->reserve(100);
  }
  check_arrival(arrival, 3000, 4);
  std::memset(reserved->memory.data(), 1, 100);
  std::memset(arrival.payload.data(), 1, 3000);
}

void an_orderly_end_is_no_failure() {
  auto ends = open_two();
  End& low = ends.first;
  End& high = ends.second;
  send_pattern(*low.sender, 10, 0);
  low.sender->close();
  low.sender->close();
  check_throws<Error>([&] { send_pattern(*low.sender, 10, 1); },
                      "this end of the channel is closed");
  check(low.sender->flush(patient()), "flushed");
  low.sender.reset();
  check_arrival(take_arrival(high), 10, 0);
  check(!high.session.completions->wait(soon(100)).has_value(), "nothing else");
  check_throws<Error>([&] { send_pattern(*high.sender, 10, 1); }, "has closed its end");
}

void an_end_follows_what_was_waiting() {
  auto ends = open_two(small_slots(2));
  End& low = ends.first;
  End& high = ends.second;
  for (int number = 0; number < 10; ++number) {
    send_pattern(*low.sender, 50, number);
  }
  low.sender->close();
  check(low.sender->pending() == 8, "still waiting");
  for (int number = 0; number < 10; ++number) {
    check_arrival(take_arrival(high), 50, number);
  }
  check(low.sender->flush(patient()), "flushed");
  low.sender.reset();
  check(!high.session.completions->wait(soon(100)).has_value(), "no failure");
}

void a_receiver_that_closes_with_messages_waiting_is_a_failure() {
  auto ends = open_two(small_slots(2));
  End& low = ends.first;
  End& high = ends.second;
  for (int number = 0; number < 10; ++number) {
    send_pattern(*low.sender, 50, number);
  }
  high.sender->close();
  high.sender.reset();
  const Failure failure = take_failure(low);
  check(failure.kind == Failure::Kind::kTransport && failure.peer == 1, "a broken channel");
  check_contains(failure.text, "rank 1 (stage 5) closed its end of the channel while 8 messages");
  check_throws<Error>([&] { low.sender->flush(patient()); }, "closed its end");
}

void an_end_without_goodbye_is_a_lost_peer() {
  auto ends = open_two();
  End& low = ends.first;
  End& high = ends.second;
  for (int number = 0; number < 3; ++number) {
    send_pattern(*low.sender, 10, number);
  }
  low.sender.reset();
  for (int number = 0; number < 3; ++number) {
    check_arrival(take_arrival(high), 10, number);
  }
  const Failure failure = take_failure(high);
  check(failure.kind == Failure::Kind::kPeerLost && failure.peer == 0, "a lost peer");
  check_contains(failure.text, "rank 0 (stage 5) is gone");
  check_contains(failure.text, "F chunk 3 microbatch 2 of step -7");
  check(!high.session.completions->wait(soon()).has_value(), "said once");
  check_throws<PeerLostError>([&] { send_pattern(*high.sender, 10, 1); }, "rank 0 (stage 5)");
}

void options_that_cannot_be() {
  for (const unsigned slots : {0U, 65U}) {
    check_throws<std::invalid_argument>([&] { open_two(small_slots(slots)); }, "1 to 64 slots");
  }
  auto ends = open_two(small_slots(64, 1));
  End& low = ends.first;
  End& high = ends.second;
  send_pattern(*low.sender, 100, 1);
  check_arrival(take_arrival(high), 100, 1);
  ShmOptions options = small_slots();
  options.limit_bytes = 100;
  auto limited = open_two(options);
  End& a = limited.first;
  check_throws<Error>([&] { send_pattern(*a.sender, 101, 0); }, "more than the limit of 100");
  Message message = message_of(4, 0);
  message.kind = MessageKind::kEnd;
  check_throws<std::invalid_argument>([&] { a.sender->send(message, "1234", {}); }, "close()");
}

void ends_may_differ_in_their_slots() {
  ShmOptions other = small_slots(7, 100'000);
  other.crc = true;
  auto ends = open_pair(opening(small_slots(2, 1000)), opening(other));
  End& low = ends.first;
  End& high = ends.second;
  for (int number = 0; number < 20; ++number) {
    send_pattern(*low.sender, 5000, number);
    send_pattern(*high.sender, 50'000, number);
    check_arrival(take_arrival(high), 5000, number);
    check_arrival(take_arrival(low), 50'000, number);
  }
  check(std::get<std::int64_t>(high.sender->info().at("slots")) == 7, "info about this end");
}

void streaming_copies_are_copies() {
  const Bytes from = pattern(100'000, 3);
  for (const std::size_t size : {0, 1, 63, 64, 65, 127, 128, 255, 256, 1000, 4096, 99'000}) {
    for (const std::size_t shift : {0, 1, 31, 63}) {
      Bytes to(100'200, 0xEE);
      auto* const target = reinterpret_cast<std::byte*>(to.data()) + shift;
      copy_streaming(target, reinterpret_cast<const std::byte*>(from.data()) + shift / 2, size);
      check(std::memcmp(target, from.data() + shift / 2, size) == 0, "equal bytes");
      check(to[shift + size] == 0xEE && (shift == 0 || to[shift - 1] == 0xEE), "no more");
    }
  }
}

}  // namespace
}  // namespace adaptive::testing

int main(int argc, char** argv) {
  using namespace adaptive::testing;
  const std::string only = argc > 1 ? argv[1] : "";
  const auto test = [&only](const char* name, const std::function<void()>& body) {
    run(name, body, only);
  };
  test("sizes", [] { messages_of_any_size_arrive_in_order(small_slots()); });
  test("sizes, one slot", [] { messages_of_any_size_arrive_in_order(small_slots(1)); });
  test("sizes, most slots", [] { messages_of_any_size_arrive_in_order(small_slots(64)); });
  test("sizes, large slots",
       [] { messages_of_any_size_arrive_in_order(small_slots(3, std::size_t{2} << 20)); });
  test("sizes, checksums", [] {
    adaptive::ShmOptions options = small_slots();
    options.crc = true;
    messages_of_any_size_arrive_in_order(options);
  });
  test("sizes, plain copies", [] {
    adaptive::ShmOptions options = small_slots();
    options.stream_from_bytes = 1 << 30;
    messages_of_any_size_arrive_in_order(options);
  });
  test("both directions", both_directions_at_once);
  test("back-pressure", sending_never_waits_for_the_peer);
  test("returns", slots_come_back_in_any_order_from_any_thread);
  test("held view", a_slow_receiver_sees_what_was_sent_not_what_came_later);
  test("reserve", reserved_memory_is_handed_over_without_a_copy);
  test("reserve, both ends", a_reserved_slot_waits_for_both_ends);
  test("reserve, dropped", dropped_reservations_come_back);
  test("reserve, order", committed_messages_keep_their_place_behind_waiting_ones);
  test("pieces", large_messages_arrive_while_the_receiver_computes);
  test("pieces, bounded", assembled_messages_are_bounded_by_the_slots);
  test("views", views_outlive_the_channel);
  test("close", an_orderly_end_is_no_failure);
  test("close, backlog", an_end_follows_what_was_waiting);
  test("close, receiver", a_receiver_that_closes_with_messages_waiting_is_a_failure);
  test("close, lost", an_end_without_goodbye_is_a_lost_peer);
  test("options", options_that_cannot_be);
  test("options, unequal", ends_may_differ_in_their_slots);
  test("copies", streaming_copies_are_copies);
  return summary();
}
