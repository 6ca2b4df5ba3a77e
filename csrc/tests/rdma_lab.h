// What the RDMA tests share: the two processes that run each of them, on two nodes or on one, and
// messages whose bytes can be checked. Started by tests/labs/rdma_lab, which sets RANK and
// LAB_ADDRS; ranks go through the tests in step.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/channel.h"
#include "common/error.h"
#include "common/link.h"
#include "rdma/channel.h"
#include "tests/check.h"

namespace adaptive::testing {

constexpr std::uint64_t kJob = 77;

inline std::string variable(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr) {
    throw std::runtime_error(std::string(name) +
                             " is not set: run this by python -m tests.labs.rdma_lab");
  }
  return value;
}

class Lab {
 public:
  Lab() : rank_(std::stoi(variable("RANK"))) {
    const std::string list = variable("LAB_ADDRS");
    first_address_ = list.substr(0, list.find(','));
    const char* first_port = std::getenv("LAB_FIRST_PORT");  // where several run one after another
    port_ = first_port == nullptr ? 21000 : std::stoi(first_port);
    control_ = link(next_port());
  }

  int rank() const { return rank_; }
  int peer() const { return 1 - rank_; }

  // A new link to the other rank; both call it with the same port.
  Link link(int port) const {
    Identity self;
    self.token.fill(9);
    self.rank = rank_;
    self.purpose = "rdma";
    if (rank_ == 0) {
      return Listener::on_tcp(first_address_, port, self).accept(1, "rdma", patient(), {});
    }
    return connect_tcp(first_address_, port, self, 0, patient(), {});
  }

  int next_port() { return port_++; }

  // Tells the other rank something; both call it.
  std::string exchange(const std::string& text) {
    control_.send_record({text.begin(), text.end()}, {}, patient(), {});
    const auto answer = control_.recv_record(4096, 0, patient(), {}).bytes;
    return {answer.begin(), answer.end()};
  }
  void meet() { exchange("here"); }

 private:
  int rank_;
  std::string first_address_;
  Link control_;
  int port_ = 0;
};

// One end of a channel with everything that a process has for it.
struct End {
  Session session;
  std::unique_ptr<Sender> sender;

  End(const Lab& lab, int port, const RdmaOptions& options) {
    session.completions = std::make_shared<Completions>(1);
    session.reactor = std::make_shared<Reactor>();
    session.job = kJob;
    session.rank = lab.rank();
    session.describe = [](int rank) { return "rank " + std::to_string(rank) + " of the lab"; };
    sender = open_rdma(session, lab.link(port), options, patient(), {});
  }

  // Both ends close, so that neither waits for the other's last words.
  void close() {
    sender->close();
    check(sender->flush(patient()), "everything to go out");
  }
};

inline std::uint8_t byte_at(std::uint64_t sequence, std::uint64_t offset) {
  return static_cast<std::uint8_t>(sequence * 31 + offset * 7 + (offset >> 12));
}

inline void fill(std::byte* data, std::size_t size, std::uint64_t sequence) {
  // A block's bytes are those of a wheel that steps by 7, from one place or another. Copied:
  // emulated processors take long to compute each, above all under a sanitizer.
  constexpr std::size_t kBlock = 4096;
  static const auto wheel = [] {
    std::array<std::byte, kBlock + 256> made{};
    for (std::size_t i = 0; i < made.size(); ++i) {
      made[i] = static_cast<std::byte>(i * 7);
    }
    return made;
  }();
  for (std::size_t offset = 0; offset < size; offset += kBlock) {
    const auto from = static_cast<std::uint8_t>(byte_at(sequence, offset) * 183);  // 7 * 183 = 1
    std::memcpy(data + offset, wheel.data() + from, std::min(kBlock, size - offset));
  }
}

inline Message message_of(std::size_t nbytes, std::uint64_t sequence) {
  Message message;
  message.kind = MessageKind::kForward;
  message.dtype = ElementType::kUInt8;
  message.dimensions = 1;
  message.shape[0] = static_cast<std::int64_t>(nbytes);
  message.nbytes = nbytes;
  message.step = static_cast<std::int64_t>(sequence) * 3;
  message.microbatch = static_cast<std::int32_t>(sequence);
  return message;
}

// Copies are kept by nobody but the channel, if it has to.
inline void send(Sender& sender, std::size_t nbytes, std::uint64_t sequence) {
  std::vector<std::byte> data(nbytes);
  fill(data.data(), nbytes, sequence);
  sender.send(message_of(nbytes, sequence), data.data(), Keeper{});
}

inline Arrival next_arrival(Completions& completions, const Deadline& deadline = patient()) {
  std::optional<Item> item = completions.wait(deadline);
  check(item.has_value(), "an item");
  if (auto* failure = std::get_if<Failure>(&*item)) {
    throw std::runtime_error("expected an arrival, got: " + failure->text);
  }
  return std::get<Arrival>(std::move(*item));
}

inline Failure next_failure(Completions& completions, const Deadline& deadline = patient()) {
  for (;;) {
    std::optional<Item> item = completions.wait(deadline);
    check(item.has_value(), "a failure");
    if (auto* failure = std::get_if<Failure>(&*item)) {
      return *failure;
    }
  }
}

inline void check_arrival(const Arrival& arrival, std::size_t nbytes, std::uint64_t sequence) {
  check(arrival.message.sequence == sequence, "message " + std::to_string(sequence) + ", not " +
                                                  std::to_string(arrival.message.sequence));
  check(arrival.message.nbytes == nbytes && arrival.payload.size_bytes() == nbytes,
        std::to_string(nbytes) + " bytes, not " + std::to_string(arrival.message.nbytes));
  check(arrival.message.microbatch == static_cast<std::int32_t>(sequence), "its label");
  std::vector<std::byte> due(nbytes);
  fill(due.data(), nbytes, sequence);
  check(nbytes == 0 || std::memcmp(due.data(), arrival.payload.data(), nbytes) == 0,
        "the bytes of message " + std::to_string(sequence));
}

inline RdmaOptions small_slots() {
  RdmaOptions options;
  options.slot_bytes = 8192;
  options.slots = 4;
  return options;
}

// Goes through tests of both ranks, those whose name contains the program's argument; ends the
// program after one that failed on either.
class LabTests {
 public:
  LabTests(Lab& lab, int argc, char** argv) : lab_(lab), only_(argc > 1 ? argv[1] : "") {}

  void operator()(const std::string& name, const std::function<void()>& body) const {
    if (name.find(only_) == std::string::npos) {
      return;
    }
    run(name, body);
    if (lab_.exchange(std::to_string(failures())) != "0" || failures() != 0) {
      std::exit(summary());
    }
  }

 private:
  Lab& lab_;
  std::string only_;
};

}  // namespace adaptive::testing
