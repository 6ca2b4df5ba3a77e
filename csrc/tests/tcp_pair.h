// What the tests of the TCP channel share: processes with a queue, pairs of them, payloads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "common/channel.h"
#include "common/link.h"
#include "tcp/channel.h"
#include "tests/check.h"

namespace adaptive::testing {

using std::chrono::milliseconds;

using Payload = std::vector<std::byte>;

constexpr std::uint64_t kJob = 99;
const adaptive::Tick kNoTick;

inline Identity identity(int rank) {
  Identity self;
  self.token.fill(3);
  self.rank = rank;
  self.purpose = "tcp";
  return self;
}

inline Link connect(const std::string& address, int self, int peer) {
  const std::size_t colon = address.rfind(':');
  return connect_tcp(address.substr(0, colon), std::stoi(address.substr(colon + 1)), identity(self),
                     peer, patient(), kNoTick);
}

inline Payload payload_of(std::size_t size_bytes, std::uint64_t seed) {
  Payload payload(size_bytes);
  std::uint64_t state = seed * 2654435761U + 1;
  for (std::size_t i = 0; i < size_bytes; ++i) {
    if (i % 64 == 0) {
      state = state * 6364136223846793005U + 1442695040888963407U;
    }
    payload[i] = static_cast<std::byte>(state >> (i % 8 * 8));
  }
  return payload;
}

// All that a process has: one channel per peer, one queue.
struct Node {
  explicit Node(int rank, std::uint64_t job = kJob, double spin_us = -1.0) {
    session.completions = std::make_shared<Completions>(2, spin_us);
    session.reactor = std::make_shared<Reactor>();
    session.job = job;
    session.rank = rank;
    session.describe = [](int peer) { return "rank " + std::to_string(peer) + " on testhost"; };
  }

  std::unique_ptr<Sender> open(Link link, const TcpOptions& options = {}) const {
    return open_tcp(session, std::move(link), options, patient(), kNoTick);
  }

  Item wait() const {
    auto item = session.completions->wait(patient());
    check(item.has_value(), "an item in time");
    return std::move(*item);
  }

  Arrival arrival() const {
    Item item = wait();
    if (const auto* failure = std::get_if<Failure>(&item)) {
      throw std::runtime_error("unexpected failure: " + failure->text);
    }
    return std::move(std::get<Arrival>(item));
  }

  // The failure that comes after any number of arrivals.
  Failure failure() const {
    for (;;) {
      Item item = wait();
      if (auto* failure = std::get_if<Failure>(&item)) {
        return std::move(*failure);
      }
    }
  }

  bool nothing_comes(int milliseconds = 50) const {
    return !session.completions->wait(soon(milliseconds)).has_value();
  }

  Session session;
};

inline Message message_of(std::size_t nbytes, int microbatch = 0) {
  Message message;
  message.kind = MessageKind::kForward;
  message.step = 12;
  message.chunk = 1;
  message.microbatch = microbatch;
  message.dimensions = 1;
  message.shape[0] = static_cast<std::int64_t>(nbytes);
  message.nbytes = nbytes;
  return message;
}

// Of a payload that lives long enough.
inline void send(Sender& sender, const Payload& payload, int microbatch = 0) {
  sender.send(message_of(payload.size(), microbatch), payload.data(), {});
}

// Of one that lives as long as the channel says.
inline void send(Sender& sender, Payload&& payload, int microbatch = 0) {
  auto owner = std::make_shared<Payload>(std::move(payload));
  const auto make = [](void* context) -> std::shared_ptr<void> {
    return *static_cast<std::shared_ptr<Payload>*>(context);
  };
  sender.send(message_of(owner->size(), microbatch), owner->data(), {make, &owner});
}

inline void check_payload(const Arrival& arrival, const Payload& expected) {
  check(
      arrival.message.nbytes == expected.size() && arrival.payload.size_bytes() == expected.size(),
      std::to_string(expected.size()) + " bytes");
  check(std::equal(expected.begin(), expected.end(), arrival.payload.data()), "the bytes sent");
}

// Rank 0 in a child, rank 1 here; each gets the link to the other.
struct Peer {
  explicit Peer(const std::function<void(Link)>& body)
      : listener(Listener::on_tcp("127.0.0.1", 0, identity(1))) {
    child = std::make_unique<Child>([&] { body(connect(listener.address(), 0, 1)); });
    link = listener.accept(0, "tcp", patient(), kNoTick);
  }
  Listener listener;
  std::unique_ptr<Child> child;
  Link link;
};

// Both ends in this process.
struct Ends {
  Ends() : listener(Listener::on_tcp("127.0.0.1", 0, identity(1))) {
    Joined thread([&] { far = connect(listener.address(), 0, 1); });
    near = listener.accept(0, "tcp", patient(), kNoTick);
    thread.join();
  }
  Listener listener;
  Link near;
  Link far;
};

// An end that has closed says so to the other and waits for what it still has to send.
inline void leave(Sender& sender) {
  sender.close();
  sender.close();
  check(sender.flush(patient()), "everything sent");
}

inline void wait_for_goodbye(const Node& node) {
  check(node.nothing_comes(), "no failure after an orderly end");
}

}  // namespace adaptive::testing
