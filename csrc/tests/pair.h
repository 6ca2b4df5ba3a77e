// Two ends of a channel, as two threads of this process or as two processes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "common/channel.h"
#include "common/completions.h"
#include "common/link.h"
#include "common/reactor.h"
#include "tests/check.h"

namespace adaptive::testing {

constexpr std::uint64_t kJob = 0x1234'5678'9abcULL;

inline Identity identity_of(int rank) {
  Identity identity;
  identity.token.fill(9);
  identity.rank = rank;
  identity.purpose = "shm";
  return identity;
}

inline Session make_session(int rank) {
  Session session;
  session.completions = std::make_shared<Completions>(2);
  session.reactor = std::make_shared<Reactor>();
  session.job = kJob;
  session.rank = rank;
  session.local_processes = 2;
  session.describe = [](int peer) { return "rank " + std::to_string(peer) + " (stage 5)"; };
  return session;
}

// One process's end; `sender` goes first.
struct End {
  Session session;
  std::unique_ptr<Sender> sender;
};

using Open = std::function<std::unique_ptr<Sender>(const Session&, Link)>;

// Rank 0 connects, rank 1 accepts.
inline End open_end(int rank, Listener* listener, const std::string& address, const Open& open) {
  End end;
  end.session = make_session(rank);
  Link link = rank == 0 ? connect_unix(address, identity_of(0), 1, patient(), {})
                        : listener->accept(0, "shm", patient(), {});
  end.sender = open(end.session, std::move(link));
  return end;
}

// Both ends in this process. Throws what either threw.
inline std::pair<End, End> open_pair(const Open& open_low, const Open& open_high) {
  Listener listener = Listener::on_unix(identity_of(1));
  std::pair<End, End> ends;
  std::exception_ptr thrown_low;
  std::exception_ptr thrown_high;
  std::thread other([&] {
    try {
      ends.first = open_end(0, nullptr, listener.address(), open_low);
    } catch (...) {
      thrown_low = std::current_exception();
    }
  });
  try {
    ends.second = open_end(1, &listener, "", open_high);
  } catch (...) {
    thrown_high = std::current_exception();
  }
  other.join();
  for (const std::exception_ptr& thrown : {thrown_low, thrown_high}) {
    if (thrown) {
      std::rethrow_exception(thrown);
    }
  }
  return ends;
}

// ---- Messages of bytes that can be recognized

using Bytes = std::vector<unsigned char>;

inline Bytes pattern(std::size_t size, unsigned seed) {
  Bytes bytes(size);
  std::uint32_t state = seed * 2654435761U + 12345U;
  for (auto& byte : bytes) {
    state = state * 1664525U + 1013904223U;
    byte = static_cast<unsigned char>(state >> 24);
  }
  return bytes;
}

inline Message message_of(std::size_t size, int microbatch) {
  Message message;
  message.kind = MessageKind::kForward;
  message.step = -7;
  message.chunk = 3;
  message.microbatch = microbatch;
  message.dtype = ElementType::kUInt8;
  message.dimensions = 1;
  message.shape[0] = static_cast<std::int64_t>(size);
  message.nbytes = size;
  return message;
}

// Keeps the memory of vectors that are sent.
inline Keeper keeping(std::shared_ptr<Bytes>* bytes) {
  return {[](void* context) -> std::shared_ptr<void> {
            return *static_cast<std::shared_ptr<Bytes>*>(context);
          },
          bytes};
}

inline void send(Sender& sender, std::shared_ptr<Bytes> bytes, int microbatch) {
  sender.send(message_of(bytes->size(), microbatch), bytes->data(), keeping(&bytes));
}

inline void send_pattern(Sender& sender, std::size_t size, int number) {
  send(sender, std::make_shared<Bytes>(pattern(size, static_cast<unsigned>(number))), number);
}

inline Item take(End& end) {
  auto item = end.session.completions->wait(patient());
  check(item.has_value(), "an item");
  return std::move(*item);
}

inline Arrival take_arrival(End& end) {
  Item item = take(end);
  if (const auto* failure = std::get_if<Failure>(&item)) {
    throw std::runtime_error("expected an arrival, got: " + failure->text);
  }
  return std::get<Arrival>(std::move(item));
}

inline Failure take_failure(End& end) {
  Item item = take(end);
  check(std::holds_alternative<Failure>(item), "a failure");
  return std::get<Failure>(item);
}

inline void check_arrival(const Arrival& arrival, std::size_t size, int number) {
  const std::string name = "message " + std::to_string(number);
  check(arrival.message.microbatch == number && arrival.message.step == -7 &&
            arrival.message.chunk == 3 && arrival.message.nbytes == size &&
            arrival.message.shape[0] == static_cast<std::int64_t>(size),
        name + " with its header, not " + describe(arrival.message));
  const Bytes wanted = pattern(size, static_cast<unsigned>(number));
  check(arrival.payload.size_bytes() == size, name + " with its size");
  check(size == 0 || std::memcmp(arrival.payload.data(), wanted.data(), size) == 0,
        name + " with its bytes");
}

}  // namespace adaptive::testing
