// Tests of the rules that channels with shared memory, TCP and RDMA have in common. Most tests have
// both ends in this process, so that sanitizers see both. RDMA is tested too if the program was
// built with it and a device exists, as in tests/labs.
#include "shm/channel.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <fstream>
#include <mutex>
#include <random>
#include <thread>

#include "common/copy.h"
#include "common/error.h"
#include "rdma/channel.h"
#include "rdma/devices.h"
#include "shm/limits.h"
#include "tcp/channel.h"
#include "tests/pair.h"

namespace adaptive::testing {
namespace {

enum class Transport { kShm, kTcp, kRdma };

// The transport of the current tests.
Transport transport = Transport::kShm;

bool is_shm() {
  return transport == Transport::kShm;
}
bool is_rdma() {
  return transport == Transport::kRdma;
}

// The kind of address at which the two ends connect.
Kind wire() {
  return is_shm() ? Kind::kUnix : Kind::kTcp4;
}

ChannelOptions small_slots(unsigned slots = 4, std::size_t slot_bytes = 4096) {
  ChannelOptions options;
  options.slots = slots;
  options.slot_bytes = slot_bytes;
  return options;
}

template <typename Options>
Options as(const ChannelOptions& options) {
  Options chosen;
  static_cast<ChannelOptions&>(chosen) = options;
  return chosen;
}

Open opening(const ChannelOptions& options = small_slots()) {
  return [options](const Session& session, Link link) {
    switch (transport) {
      case Transport::kShm:
        return open_shm(session, std::move(link), as<ShmOptions>(options), patient(), kNoTick);
      case Transport::kRdma:
        return open_rdma(session, std::move(link), as<RdmaOptions>(options), patient(), kNoTick);
      case Transport::kTcp:
        break;
    }
    return open_tcp(session, std::move(link), options, patient(), kNoTick);
  };
}

std::pair<End, End> open_two(const ChannelOptions& options = small_slots()) {
  return open_pair(opening(options), opening(options), wire());
}

const std::vector<std::size_t> kSizes{0,    1,    7,    64,    1000,  4095,   4096,
                                      4097, 8192, 9999, 20000, 65536, 1 << 20};

// ---- Messages

void messages_of_any_size_arrive_in_order(const ChannelOptions& options) {
  auto [low, high] = open_two(options);
  Joined sender([&end = low] {
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
      check_arrival(take_arrival(high), size, number++);
    }
  }
  sender.join();
  check(low.sender->pending() == 0, "nothing pending");
}

void both_directions_at_once() {
  auto [low, high] = open_two();
  const auto talk = [](End& end) {
    const auto size_of = [](int number) { return static_cast<std::size_t>(number) * 7 % 9000; };
    for (int number = 0; number < 2010; ++number) {
      if (number < 2000) {
        send_pattern(*end.sender, size_of(number), number);
      }
      if (number >= 10) {
        check_arrival(take_arrival(end), size_of(number - 10), number - 10);
      }
    }
    check(end.sender->flush(patient()), "everything sent");
  };
  std::exception_ptr thrown;
  {
    const Joined other([&, &end = low] {
      try {
        talk(end);
      } catch (...) {
        thrown = std::current_exception();
      }
    });
    talk(high);
  }
  if (thrown) {
    std::rethrow_exception(thrown);
  }
}

// send() returns even if the peer takes no message, and the stored data are released later.
void sending_never_waits_for_the_peer() {
  auto [low, high] = open_two();
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
  eventually([&kept = kept] { return kept.back().expired(); }, "memory let go of");
  // The sender also releases the memory if the peer closes the channel first.
  std::vector<Arrival> held;
  for (int number = 0; number < 10; ++number) {
    auto bytes = std::make_shared<Bytes>(pattern(3000, 1));
    kept.push_back(bytes);
    send(*low.sender, std::move(bytes), number);
  }
  high.sender.reset();
  take_failure(low);
  eventually([&kept = kept] { return kept.back().expired(); }, "memory let go of");
}

void slots_come_back_in_any_order_from_any_thread() {
  auto [low, high] = open_two(small_slots(8));
  constexpr int kCount = 1000;
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
  Joined sender([&end = low] {
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
  auto [low, high] = open_two(small_slots(2));
  send_pattern(*low.sender, 500, 0);
  const Arrival first = take_arrival(high);
  check(first.slots == 2 && *first.held == 1, "one of two slots held");
  for (int number = 1; number < 20; ++number) {
    send_pattern(*low.sender, 500, number);
    check_arrival(take_arrival(high), 500, number);
  }
  check_arrival(first, 500, 0);
  send_pattern(*low.sender, 500, 20);
  const Arrival second = take_arrival(high);
  send_pattern(*low.sender, 500, 21);
  check(nothing_comes(high), "no more messages than slots");
}

// ---- Closing

void views_outlive_the_channel() {
  Arrival arrival;
  std::optional<Reserved> reserved;
  {
    auto [low, high] = open_two();
    send_pattern(*low.sender, 3000, 4);
    arrival = take_arrival(high);
    reserved = low.sender->reserve(100);
    check(reserved.has_value() == (transport != Transport::kTcp), "memory to compute into");
  }
  check_arrival(arrival, 3000, 4);
  std::memset(arrival.payload.data(), 1, 3000);
  if (reserved) {
    std::memset(reserved->memory.data(), 1, 100);
  }
}

void an_orderly_end_is_no_failure() {
  auto [low, high] = open_two(small_slots(2));
  for (int number = 0; number < 10; ++number) {
    send_pattern(*low.sender, 50, number);
  }
  low.sender->close();
  low.sender->close();
  check(low.sender->pending() == (is_rdma() ? 9 : 8), "still waiting, with RDMA the end, too");
  check_throws<Error>([&end = low] { send_pattern(*end.sender, 10, 1); }, "closed");
  for (int number = 0; number < 10; ++number) {
    check_arrival(take_arrival(high), 50, number);
  }
  check(low.sender->flush(patient()), "flushed");
  low.sender.reset();
  check(nothing_comes(high, 100), "nothing else");
  check_throws<Error>([&end = high] { send_pattern(*end.sender, 10, 1); },
                      is_shm()    ? "has closed its end"
                      : is_rdma() ? "was closed by the peer"
                                  : "the other end has left");
}

void an_end_without_goodbye_is_a_lost_peer() {
  auto [low, high] = open_two();
  for (int number = 0; number < 3; ++number) {
    send_pattern(*low.sender, 10, number);
  }
  low.sender.reset();
  for (int number = 0; number < 3; ++number) {
    check_arrival(take_arrival(high), 10, number);
  }
  const Failure failure = take_failure(high);
  check(failure.kind == Failure::Kind::kPeerLost && failure.peer == 0, "a lost peer");
  check_contains(failure.text, "rank 0 (stage 5)");
  check_contains(failure.text, "the last message from it was F chunk 3 microbatch 2 of step -7");
  check(nothing_comes(high), "said once");
  check_throws<PeerLostError>([&end = high] { send_pattern(*end.sender, 10, 1); },
                              "rank 0 (stage 5)");
}

void options_that_cannot_be() {
  for (const unsigned slots : {0U, 65U}) {
    check_throws<std::invalid_argument>([&] { open_two(small_slots(slots)); }, "1 to 64 slots");
  }
  if (!is_rdma()) {
    auto [low, high] = open_two(small_slots(64, 1));
    send_pattern(*low.sender, 100, 1);
    check_arrival(take_arrival(high), 100, 1);
  }
  ChannelOptions options = small_slots();
  options.limit_bytes = 100;
  auto [low, high] = open_two(options);
  check_throws<Error>([&end = low] { send_pattern(*end.sender, 101, 0); },
                      "more than the limit of 100");
}

void ends_may_differ_in_their_options() {
  ChannelOptions other = small_slots(7, 100'000);
  other.crc = true;
  auto [low, high] = open_pair(opening(small_slots(2, 1000)), opening(other), wire());
  for (int number = 0; number < 20; ++number) {
    send_pattern(*low.sender, 5000, number);
    send_pattern(*high.sender, 50'000, number);
    check_arrival(take_arrival(high), 5000, number);
    check_arrival(take_arrival(low), 50'000, number);
  }
  check(std::get<std::int64_t>(high.sender->info().at("slots")) == 7, "info about this end");
}

// ---- Processes that exit or fork

// Sends and receives until the peer is lost. The loss must be reported within 5 s of silence.
void exchange_until_lost(End& end) {
  try {
    for (int number = 0;; ++number) {
      send_pattern(*end.sender, static_cast<std::size_t>(number) * 37 % 9000, number);
      auto item = end.session.completions->wait(soon(5000));
      check(item.has_value(), "an item within 5 s");
      if (const auto* failure = std::get_if<Failure>(&*item)) {
        check(failure->kind == Failure::Kind::kPeerLost, "a lost peer, not " + failure->text);
        return;
      }
    }
  } catch (const PeerLostError&) {
    while (!std::holds_alternative<Failure>(take(end))) {
    }
  }
}

void kills_at_random_moments() {
  std::mt19937 random(99);
  for (int i = 0; i < 20; ++i) {
    Processes both(exchange_until_lost, opening(small_slots(3)), exchange_until_lost,
                   opening(small_slots(3)), wire());
    ::usleep(random() % 20'000);
    Child& victim = i % 2 == 0 ? *both.low : *both.high;
    Child& survivor = i % 2 == 0 ? *both.high : *both.low;
    victim.kill();
    survivor.join();
  }
}

void a_killed_receiver_is_noticed_by_who_waits_in_flush() {
  int sent[2];
  check(::pipe(sent) == 0, "pipe");
  Processes both(
      [&](End& end) {
        for (int number = 0; number < 100; ++number) {
          send_pattern(*end.sender, 3000, number);
        }
        check(::write(sent[1], "1", 1) == 1, "write");
        check_throws<PeerLostError>([&] { end.sender->flush(patient()); }, "rank 1 (stage 5)");
        check(take_failure(end).kind == Failure::Kind::kPeerLost, "a failure as well");
      },
      opening(), [](End&) { ::pause(); }, opening(), wire());
  ::close(sent[1]);
  char byte = 0;
  check(::read(sent[0], &byte, 1) == 1, "all to be sent, or to wait for slots");
  ::close(sent[0]);
  ::usleep(100'000);  // time for the sender to wait in flush
  both.high->kill();
  both.low->join();
}

void a_forked_child_disturbs_nobody() {
  const auto low_body = [](End& end) {
    send_pattern(*end.sender, 1000, 0);
    Arrival held = take_arrival(end);
    auto reserved = end.sender->reserve(100);
    Child([&] {
      if (!is_rdma()) {  // the RDMA memory may not be mapped in a child
        check_arrival(held, 1000, 7);
      }
      held = Arrival();
      reserved.reset();
      check_throws<Error>([&] { send_pattern(*end.sender, 10, 1); }, "forked child");
      end.sender->close();
      end.sender.reset();
    }).join();
    send_pattern(*end.sender, 1000, 1);
    check_arrival(held, 1000, 7);
    end.sender->close();
    check(end.sender->flush(patient()), "flushed");
    take(end);  // the peer's last message
  };
  const auto high_body = [](End& end) {
    send_pattern(*end.sender, 1000, 7);
    check_arrival(take_arrival(end), 1000, 0);
    check_arrival(take_arrival(end), 1000, 1);
    check(nothing_comes(end), "no failure");
    send_pattern(*end.sender, 1, 8);
    end.sender->close();
    check(end.sender->flush(patient()), "flushed");
  };
  Processes(low_body, opening(), high_body, opening(), wire()).join();
}

// ---- Memory of the channel

void reserved_memory_is_handed_over_without_a_copy() {
  auto [low, high] = open_two(small_slots(3));
  auto reserved = low.sender->reserve(1000);
  check(reserved.has_value(), "room");
  check(reinterpret_cast<std::uintptr_t>(reserved->memory.data()) % 64 == 0, "alignment");
  // The payload is reserved before the other messages are sent, but committed after them. It must
  // arrive last.
  for (int number = 0; number < 6; ++number) {
    send_pattern(*low.sender, 100, number);
  }
  const Bytes bytes = pattern(1000, 6);
  std::memcpy(reserved->memory.data(), bytes.data(), bytes.size());
  low.sender->commit(message_of(1000, 6), std::move(*reserved));
  for (int number = 0; number < 7; ++number) {
    check_arrival(take_arrival(high), number == 6 ? 1000 : 100, number);
  }
  check(!low.sender->reserve(4097).has_value(), "no room for more than a slot");
}

void a_reserved_slot_waits_for_both_ends() {
  auto [low, high] = open_two(small_slots(1));
  auto reserved = low.sender->reserve(10);
  check(!low.sender->reserve(10).has_value(), "one slot only");
  Lease view = std::move(reserved->memory);
  const Bytes bytes = pattern(10, 1);
  std::memcpy(view.data(), bytes.data(), bytes.size());
  low.sender->commit(message_of(10, 1), Reserved{Lease(), reserved->token});
  check_arrival(take_arrival(high), 10, 1);
  check(!low.sender->reserve(10).has_value(), "still looked at by the sender");
  send_pattern(*low.sender, 20, 2);
  check(low.sender->pending() == 1, "no slot for the next message");
  std::thread([&view] { const Lease dropped = std::move(view); }).join();
  check_arrival(take_arrival(high), 20, 2);
}

// ---- Only shared memory

void dropped_reservations_come_back() {
  auto [low, high] = open_two(small_slots(2));
  Sender& sender = *low.sender;
  for (int i = 0; i < 10; ++i) {
    auto first = sender.reserve(10);
    auto second = sender.reserve(10);
    check(first && second && !sender.reserve(10), "two slots, again and again");
  }
  auto reserved = sender.reserve(10);
  const std::uint64_t token = reserved->token;
  reserved.reset();
  const auto commit_again = [&] { sender.commit(message_of(10, 0), Reserved{Lease(), token}); };
  check_throws<Error>(commit_again, "was not reserved");
  auto again = sender.reserve(10);
  check_throws<Error>(commit_again, "was not reserved");
  check_throws<Error>([&] { sender.commit(message_of(9999, 0), std::move(*again)); },
                      "does not fit");
  send_pattern(sender, 5, 0);
  check_arrival(take_arrival(high), 5, 0);
}

void assembled_messages_are_bounded_by_the_slots() {
  auto [low, high] = open_two(small_slots(2));
  for (int number = 0; number < 6; ++number) {
    send_pattern(*low.sender, 10'000, number);
  }
  eventually([&end = low] { return end.sender->pending() <= 4; }, "two messages through");
  ::usleep(20'000);
  check(low.sender->pending() >= 3, "no more than two messages and the slots taken");
  std::vector<Arrival> held;
  held.push_back(take_arrival(high));
  held.push_back(take_arrival(high));
  check(nothing_comes(high, 20), "no third before one is dropped");
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

void a_receiver_that_closes_with_messages_waiting_is_a_failure() {
  auto [low, high] = open_two(small_slots(2));
  for (int number = 0; number < 10; ++number) {
    send_pattern(*low.sender, 50, number);
  }
  high.sender->close();
  high.sender.reset();
  const Failure failure = take_failure(low);
  check(failure.kind == Failure::Kind::kTransport && failure.peer == 1, "a broken channel");
  check_contains(failure.text, "rank 1 (stage 5) closed its end of the channel while 8 messages");
  check_throws<Error>([&end = low] { end.sender->flush(patient()); }, "closed its end");
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

void write_file(const std::string& path, const std::string& text) {
  std::ofstream file(path);
  file << text;
}

void memory_limits_are_read() {
  char folder[] = "/tmp/shm_test_XXXXXX";
  check(::mkdtemp(folder) != nullptr, "mkdtemp");
  const std::string root = folder;
  const SystemPaths paths{root + "/proc", root + "/cg"};
  check(std::system(
            ("mkdir -p " + root + "/proc/self " + root + "/cg/a/b " + root + "/cg/memory/docker")
                .c_str()) == 0,
        "mkdir");
  write_file(root + "/proc/meminfo", "MemTotal: 900 kB\nMemAvailable:   1048576 kB\n");
  check(memory_room(paths).bytes == std::uint64_t{1} << 30, "MemAvailable");
  write_file(root + "/proc/self/cgroup", "5:cpu,memory:/docker/x\n0::/a/b\n");
  write_file(root + "/cg/a/memory.max", "500000000\n");
  write_file(root + "/cg/a/memory.current", "300000000\n");
  write_file(root + "/cg/a/memory.stat", "anon 5\ninactive_file 100000000\n");
  write_file(root + "/cg/a/b/memory.max", "max\n");
  write_file(root + "/cg/a/b/memory.current", "1\n");
  check(memory_room(paths).bytes == 300'000'000, "the second version");
  write_file(root + "/cg/memory/memory.limit_in_bytes", "150000000\n");
  write_file(root + "/cg/memory/memory.usage_in_bytes", "50000000\n");
  check(memory_room(paths).bytes == 100'000'000, "the first version");
  check_throws<Error>([&] { check_memory(80'000'000, "a test", paths); },
                      "a test needs 76.29 MiB of shared memory, but 95.37 MiB are left within the "
                      "memory limit of the container");
  check_memory(20'000'000, "a test", paths);
  check(std::system(("rm -r " + root).c_str()) == 0, "rm");
}

void more_memory_than_there_is_is_an_error_on_both_ends() {
  check_throws<Error>([&] { open_two(small_slots(64, std::size_t{1} << 40)); },
                      "64 slots of 1 TiB) needs 64 TiB of shared memory");
}

void run_all(const std::string& only) {
  const auto test = [&](const std::string& name, const std::function<void()>& body) {
    run(name + (is_shm() ? " (shm)" : is_rdma() ? " (rdma)" : " (tcp)"), body, only);
  };
  std::vector<Transport> all{Transport::kShm, Transport::kTcp};
  if (built_with_rdma() && !list_rdma_devices().empty()) {
    all.push_back(Transport::kRdma);
  }
  ChannelOptions checked = small_slots();
  checked.crc = true;
  for (const Transport one : all) {
    transport = one;
    test("sizes", [] { messages_of_any_size_arrive_in_order(small_slots()); });
    test("sizes, one slot", [] { messages_of_any_size_arrive_in_order(small_slots(1)); });
    test("sizes, most slots", [] { messages_of_any_size_arrive_in_order(small_slots(64)); });
    test("sizes, checksums", [&] { messages_of_any_size_arrive_in_order(checked); });
    test("both directions", both_directions_at_once);
    test("back-pressure", sending_never_waits_for_the_peer);
    test("returns", slots_come_back_in_any_order_from_any_thread);
    test("held view", a_slow_receiver_sees_what_was_sent_not_what_came_later);
    test("views", views_outlive_the_channel);
    test("close", an_orderly_end_is_no_failure);
    test("close, lost", an_end_without_goodbye_is_a_lost_peer);
    test("options", options_that_cannot_be);
    test("kills", kills_at_random_moments);
    test("killed receiver", a_killed_receiver_is_noticed_by_who_waits_in_flush);
    test("fork", a_forked_child_disturbs_nobody);
    if (one != Transport::kRdma) {  // RDMA needs the same options at both ends
      test("options, unequal", ends_may_differ_in_their_options);
    }
    if (one != Transport::kTcp) {
      test("reserve", reserved_memory_is_handed_over_without_a_copy);
      test("reserve, both ends", a_reserved_slot_waits_for_both_ends);
    }
  }
  transport = Transport::kShm;
  test("reserve, dropped", dropped_reservations_come_back);
  test("pieces, bounded", assembled_messages_are_bounded_by_the_slots);
  test("close, receiver", a_receiver_that_closes_with_messages_waiting_is_a_failure);
  test("copies", streaming_copies_are_copies);
  test("limits", memory_limits_are_read);
  test("too much", more_memory_than_there_is_is_an_error_on_both_ends);
}

}  // namespace
}  // namespace adaptive::testing

int main(int argc, char** argv) {
  adaptive::testing::run_all(argc > 1 ? argv[1] : "");
  return adaptive::testing::summary();
}
