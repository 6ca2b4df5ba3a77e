// Tests of the TCP channel between processes: order, content, credits, memory. Build: c++
// -std=c++17 -I csrc -pthread <this> csrc/tcp/*.cc csrc/common/*.cc
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <mutex>

#include "common/error.h"
#include "tcp/channel.h"
#include "tests/check.h"
#include "tests/tcp_pair.h"

namespace adaptive::testing {
namespace {

const std::vector<std::size_t> kSizes = {0,     1,       63,      64,      1000,
                                         16384, 1048576, 1048577, 5000000, 64U << 20};

std::int64_t present_ns() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void messages_keep_order_and_content(const TcpOptions& options) {
  const std::int64_t began_ns = present_ns();
  const auto both = [&](int rank, Link link) {
    const Node node(rank);
    const auto sender = node.open(std::move(link), options);
    std::vector<Payload> payloads;
    for (int round = 0; round < 2; ++round) {
      for (const std::size_t size : kSizes) {
        payloads.push_back(payload_of(size, payloads.size()));
      }
    }
    for (std::size_t i = 0; i < payloads.size(); ++i) {
      send(*sender, payloads[i], static_cast<int>(i));
    }
    for (std::size_t i = 0; i < payloads.size(); ++i) {
      const Arrival arrival = node.arrival();
      check(arrival.message.sequence == i && arrival.message.microbatch == static_cast<int>(i) &&
                arrival.message.chunk == 1 && arrival.message.step == 12,
            "the messages in order");
      check(arrival.peer == 1 - rank, "the peer");
      check(arrival.arrived_ns > began_ns && arrival.arrived_ns <= present_ns(), "the time");
      check_payload(arrival, payloads[i]);
    }
    leave(*sender);
    check(sender->pending() == 0, "nothing pending");
    wait_for_goodbye(node);
  };
  Peer peer([&](Link link) { both(0, std::move(link)); });
  both(1, std::move(peer.link));
  peer.child->join();
}

void many_small_messages(double spin_us) {
  constexpr int kCount = 20000;
  const auto both = [&](int rank, Link link) {
    const Node node(rank, kJob, spin_us);
    const auto sender = node.open(std::move(link));
    const Payload payload = payload_of(100, 1);
    for (int i = 0; i < kCount; ++i) {
      send(*sender, payload, i);
      check(node.arrival().message.microbatch == i, "the order");
    }
    leave(*sender);
    wait_for_goodbye(node);
  };
  Peer peer([&](Link link) { both(0, std::move(link)); });
  both(1, std::move(peer.link));
  peer.child->join();
}

// A lock step of one slot: each message waits for the return of the one before.
void one_slot_is_enough() {
  TcpOptions options;
  options.slots = 1;
  options.slot_bytes = 128;
  messages_keep_order_and_content(options);
}

long resident_kib() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss;
}

void a_slow_receiver_is_not_overrun() {
  constexpr std::size_t kSize = 1 << 20;
  constexpr int kCount = 400;
  constexpr unsigned kSlots = 4;
  TcpOptions options;
  options.slots = kSlots;
  Peer peer([&](Link link) {
    const Node node(0);
    const auto sender = node.open(std::move(link), options);
    const Payload payload = payload_of(kSize, 1);
    for (int i = 0; i < kCount; ++i) {
      send(*sender, payload, i);  // never waits
    }
    check(sender->pending() >= kCount - kSlots - 1, "messages kept back");
    check(!sender->flush(soon()), "no end yet");
    check(sender->flush(patient()), "everything sent, at last");
    leave(*sender);
    wait_for_goodbye(node);
  });
  const Node node(1);
  const auto sender = node.open(std::move(peer.link), options);
  const long before_kib = resident_kib();
  std::vector<Arrival> held;
  for (unsigned i = 0; i < kSlots; ++i) {
    held.push_back(node.arrival());
  }
  check(node.nothing_comes(), "no more messages than slots");
  check(held.front().slots == kSlots && *held.front().held == kSlots, "all slots held");
  std::swap(held.front(), held.back());
  held.pop_back();  // the first one: returns need not come in order
  held.push_back(node.arrival());
  check(node.nothing_comes(), "one message for one slot");
  held.clear();
  for (int i = static_cast<int>(kSlots) + 1; i < kCount; ++i) {
    const Arrival arrival = node.arrival();
    check(arrival.message.microbatch == i, "the order");
  }
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  check(resident_kib() - before_kib < 32 * 1024, "bounded memory");
#else
  (void)before_kib;
#endif
  leave(*sender);
  peer.child->join();
}

void held_messages_do_not_stop_the_rest() {
  TcpOptions options;
  options.slots = 8;
  Peer peer([&](Link link) {
    const Node node(0);
    const auto sender = node.open(std::move(link), options);
    const Payload payload = payload_of(5000, 1);
    for (int i = 0; i < 500; ++i) {
      send(*sender, payload, i);
    }
    leave(*sender);
    wait_for_goodbye(node);
  });
  const Node node(1);
  const auto sender = node.open(std::move(peer.link), options);
  std::vector<Arrival> held;
  for (int i = 0; i < 500; ++i) {
    Arrival arrival = node.arrival();
    check(arrival.message.microbatch == i, "the order");
    if (held.size() < 7) {
      held.push_back(std::move(arrival));
    }
  }
  for (const Arrival& arrival : held) {
    check_payload(arrival, payload_of(5000, 1));
  }
  leave(*sender);
  peer.child->join();
}

void leases_are_given_back_from_any_thread() {
  TcpOptions options;
  options.slots = 4;
  Peer peer([&](Link link) {
    const Node node(0);
    const auto sender = node.open(std::move(link), options);
    const Payload payload = payload_of(3000, 1);
    for (int i = 0; i < 2000; ++i) {
      send(*sender, payload, i);
      if (i % 3 == 0) {
        node.arrival();
      }
    }
    leave(*sender);
    wait_for_goodbye(node);
  });
  const Node node(1);
  const auto sender = node.open(std::move(peer.link), options);
  std::mutex mutex;
  std::vector<Arrival> handed;
  std::atomic<bool> done{false};
  Joined returner([&] {
    for (bool last = false; !last;) {
      last = done;
      std::vector<Arrival> mine;
      const std::lock_guard<std::mutex> lock(mutex);
      mine.swap(handed);
    }
  });
  for (int i = 0; i < 2000; ++i) {
    Arrival arrival = node.arrival();
    {
      const std::lock_guard<std::mutex> lock(mutex);
      handed.push_back(std::move(arrival));
    }
    if (i % 3 == 0) {
      send(*sender, payload_of(10, 1));
    }
  }
  done = true;
  returner.join();
  leave(*sender);
  peer.child->join();
}

// Counts how often it was asked for an owner, and how many of them live.
struct Owners {
  static std::shared_ptr<void> make(void* context) {
    auto* const self = static_cast<Owners*>(context);
    ++self->made;
    ++self->alive;
    return std::shared_ptr<void>(self, [](void* owner) { --static_cast<Owners*>(owner)->alive; });
  }
  Keeper keeper() { return {&Owners::make, this}; }
  std::atomic<int> made{0};
  std::atomic<int> alive{0};
};

void memory_is_kept_until_it_is_sent() {
  TcpOptions options;
  options.slots = 2;
  Ends ends;
  const Node near(1);
  const Node far(0);
  std::unique_ptr<Sender> receiver;
  Joined thread([&] { receiver = far.open(std::move(ends.far), options); });
  const auto sender = near.open(std::move(ends.near), options);
  thread.join();
  Owners owners;
  const Payload payload = payload_of(1000, 5);
  for (int i = 0; i < 2; ++i) {
    sender->send(message_of(1000, i), payload.data(), owners.keeper());
  }
  eventually([&] { return sender->pending() == 0; }, "two messages sent");
  const int direct = owners.made;
  for (int i = 2; i < 10; ++i) {
    sender->send(message_of(1000, i), payload.data(), owners.keeper());
  }
  check(owners.made == direct + 8 && owners.alive == 8, "eight messages kept");
  check(sender->pending() == 8, "eight messages pending");
  for (int i = 0; i < 10; ++i) {
    far.arrival();
  }
  check(sender->flush(patient()), "everything sent");
  eventually([&] { return owners.alive == 0; }, "no owner left");
  // And with a channel that ends before.
  for (int i = 0; i < 10; ++i) {
    sender->send(message_of(1000, i), payload.data(), owners.keeper());
  }
  check(owners.alive > 0, "messages kept");
  receiver.reset();
  check(near.failure().kind == Failure::Kind::kPeerLost, "the failure");
  eventually([&] { return owners.alive == 0; }, "no owner left");
}

void leases_outlive_the_channel() {
  std::vector<Arrival> kept;
  Peer peer([](Link link) {
    const Node node(0);
    const auto sender = node.open(std::move(link));
    for (const std::size_t size : {0U, 10U, 3000000U}) {
      send(*sender, payload_of(size, size));
    }
    leave(*sender);
    wait_for_goodbye(node);
  });
  {
    const Node node(1);
    const auto sender = node.open(std::move(peer.link));
    for (int i = 0; i < 3; ++i) {
      kept.push_back(node.arrival());
    }
    leave(*sender);
  }
  check_payload(kept[2], payload_of(3000000, 3000000));
  kept.clear();
  peer.child->join();
}

// Two channels of one process meet in one queue; another job runs beside them.
void several_peers_and_jobs() {
  const auto child_body = [](const std::string& address, int rank, std::uint64_t job) {
    const Node node(rank, job);
    const auto sender = node.open(connect(address, rank, 1));
    for (int i = 0; i < 300; ++i) {
      send(*sender, payload_of(static_cast<std::size_t>(i) * 37, static_cast<unsigned>(rank)), i);
      check(node.arrival().message.microbatch == i, "the echo");
    }
    leave(*sender);
    wait_for_goodbye(node);
  };
  Listener one = Listener::on_tcp("127.0.0.1", 0, identity(1));
  Listener two = Listener::on_tcp("::1", 0, identity(1));
  Child zero([&] { child_body(one.address(), 0, 1); });
  Child third([&] { child_body(one.address(), 3, 1); });
  Child other([&] { child_body(two.address(), 0, 2); });
  const Node node(1, 1);
  const Node beside(1, 2);
  const auto to_zero = node.open(one.accept(0, "tcp", patient(), kNoTick));
  const auto to_third = node.open(one.accept(3, "tcp", patient(), kNoTick));
  const auto to_other = beside.open(two.accept(0, "tcp", patient(), kNoTick));
  Joined thread([&] {
    for (int i = 0; i < 300; ++i) {
      const Arrival arrival = beside.arrival();
      to_other->send(arrival.message, arrival.payload.data(), {});
      to_other->flush(patient());
    }
  });
  for (int i = 0; i < 600; ++i) {
    const Arrival arrival = node.arrival();
    check_payload(arrival, payload_of(static_cast<std::size_t>(arrival.message.microbatch) * 37,
                                      static_cast<unsigned>(arrival.peer)));
    Sender& back = arrival.peer == 0 ? *to_zero : *to_third;
    back.send(arrival.message, arrival.payload.data(), {});
    back.flush(patient());
  }
  thread.join();
  leave(*to_zero);
  leave(*to_third);
  leave(*to_other);
  zero.join();
  third.join();
  other.join();
}

void run_all(const std::string& only) {
  const auto run = [&](const std::string& name, const std::function<void()>& test) {
    testing::run(name, test, only);
  };
  TcpOptions with_crc;
  with_crc.crc = true;
  run("order and sizes", [] { messages_keep_order_and_content({}); });
  run("order and sizes with CRC", [&] { messages_keep_order_and_content(with_crc); });
  run("one slot", one_slot_is_enough);
  run("small messages", [] { many_small_messages(-1.0); });
  run("small messages, sleeping", [] { many_small_messages(0.0); });
  run("slow receiver", a_slow_receiver_is_not_overrun);
  run("held messages", held_messages_do_not_stop_the_rest);
  run("leases from any thread", leases_are_given_back_from_any_thread);
  run("kept memory", memory_is_kept_until_it_is_sent);
  run("leases outlive", leases_outlive_the_channel);
  run("several peers and jobs", several_peers_and_jobs);
}

}  // namespace
}  // namespace adaptive::testing

int main(int argc, char** argv) {
  adaptive::testing::run_all(argc > 1 ? argv[1] : "");
  return adaptive::testing::summary();
}
