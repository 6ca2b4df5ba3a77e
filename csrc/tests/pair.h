// Two ends of a channel, in two threads of this process or in two processes.
#pragma once

#include <algorithm>
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
#include "tests/links.h"

namespace adaptive::testing {

constexpr std::uint64_t kJob = 0x1234'5678'9abcULL;

inline Session make_session(int rank, unsigned local_processes = 2) {
  Session session;
  session.completions = std::make_shared<Completions>(local_processes);
  session.reactor = std::make_shared<Reactor>();
  session.job = kJob;
  session.rank = rank;
  session.local_processes = local_processes;
  session.describe = [](int peer) { return "rank " + std::to_string(peer) + " (stage 5)"; };
  return session;
}

// One end of a channel. `sender` is destroyed first.
struct End {
  Session session;
  std::unique_ptr<Sender> sender;
};

using Open = std::function<std::unique_ptr<Sender>(const Session&, Link)>;

// Rank 0 connects, rank 1 accepts.
inline End open_end(int number, Listener* listener, const std::string& address, const Open& open) {
  End end;
  end.session = make_session(number);
  Link link =
      number == 0 ? connect(address, rank(0), 1) : listener->accept(0, "test", patient(), kNoTick);
  end.sender = open(end.session, std::move(link));
  return end;
}

// Opens both ends in this process. Throws the error of either end.
inline std::pair<End, End> open_pair(const Open& open_low, const Open& open_high,
                                     Kind kind = Kind::kUnix) {
  Listener listener = listen(kind, rank(1));
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

// Runs the two ends in separate child processes, which share only the listener's address. The
// constructor returns when the channels are open.
class Processes {
 public:
  using Body = std::function<void(End&)>;

  Processes(const Body& low_body, const Open& open_low, const Body& high_body,
            const Open& open_high, Kind kind = Kind::kUnix) {
    int addresses[2];
    int opened[2];
    check(::pipe(addresses) == 0 && ::pipe(opened) == 0, "pipes");
    high = std::make_unique<Child>([&] {
      Listener listener = listen(kind, rank(1));
      const std::string address = listener.address();
      check(::write(addresses[1], address.data(), address.size()) > 0, "write");
      End end = open_end(1, &listener, "", open_high);
      check(::write(opened[1], "1", 1) == 1, "write");
      high_body(end);
    });
    char address[200] = {};
    check(::read(addresses[0], address, sizeof(address)) > 0, "read");
    low = std::make_unique<Child>([&] {
      End end = open_end(0, nullptr, address, open_low);
      check(::write(opened[1], "0", 1) == 1, "write");
      low_body(end);
    });
    ::close(opened[1]);
    char byte = 0;
    for (int i = 0; i < 2; ++i) {
      check(::read(opened[0], &byte, 1) == 1, "both ends open");
    }
    for (const int fd : {addresses[0], addresses[1], opened[0]}) {
      ::close(fd);
    }
  }
  void join() {
    low->join();
    high->join();
  }

  std::unique_ptr<Child> low;
  std::unique_ptr<Child> high;
};

// ---- Messages with recognizable bytes

// Returns bytes that depend on `seed`. They are copied in blocks from a prepared pattern, because
// computing every byte takes too long on emulated processors, especially with a sanitizer.
inline Bytes pattern(std::size_t size, unsigned seed) {
  constexpr std::size_t kBlock = 4096;
  constexpr std::size_t kPlaces = 65521;
  static const Bytes wheel = [] {
    Bytes made(kPlaces + kBlock);
    std::uint32_t state = 12345U;
    for (auto& byte : made) {
      state = state * 1664525U + 1013904223U;
      byte = static_cast<unsigned char>(state >> 24);
    }
    return made;
  }();
  Bytes bytes(size);
  for (std::size_t at = 0; at < size; at += kBlock) {
    const std::size_t from = (seed * std::size_t{7919} + at / kBlock * 31) % kPlaces;
    std::copy_n(wheel.begin() + static_cast<std::ptrdiff_t>(from), std::min(kBlock, size - at),
                bytes.begin() + static_cast<std::ptrdiff_t>(at));
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

// Returns a keeper that keeps the memory of a sent vector alive.
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

inline bool nothing_comes(const End& end, int milliseconds = 50) {
  return !end.session.completions->wait(soon(milliseconds)).has_value();
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
