// Shared helpers of the RDMA tests: the two processes that run each test, on two nodes or on one.
// Started by tests/labs/rdma_lab, which sets RANK and LAB_ADDRS. The ranks run the same tests at
// the same time. Ends and messages are as in pair.h.
#pragma once

#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <string>

#include "common/error.h"
#include "rdma/channel.h"
#include "tests/pair.h"

namespace adaptive::testing {

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
    // if several programs run one after another
    const char* first_port = std::getenv("LAB_FIRST_PORT");
    port_ = first_port == nullptr ? 21000 : std::stoi(first_port);
    control_ = link(next_port());
  }

  int rank() const { return rank_; }
  int peer() const { return 1 - rank_; }

  // Returns a new link to the other rank. Both ranks must call it with the same port.
  Link link(int port) const {
    const Identity self = testing::rank(rank_);
    if (rank_ == 0) {
      return Listener::on_tcp(first_address_, port, self)
          .accept(1, self.purpose, patient(), kNoTick);
    }
    return connect_tcp(first_address_, port, self, 0, patient(), kNoTick);
  }

  int next_port() { return port_++; }

  // Opens this rank's end of a new channel. Both ranks must call it with the same port.
  End open(int port, const RdmaOptions& options) const {
    End end;
    end.session = make_session(rank_, 1);  // alone on its node, so waits spin longer
    end.sender = open_rdma(end.session, link(port), options, patient(), kNoTick);
    return end;
  }
  End open(const RdmaOptions& options) { return open(next_port(), options); }

  // Sends a text to the other rank and returns the other rank's text. Both ranks must call it.
  std::string exchange(const std::string& text) {
    control_.send_record({text.begin(), text.end()}, {}, patient(), kNoTick);
    const auto answer = control_.recv_record(4096, 0, patient(), kNoTick).bytes;
    return {answer.begin(), answer.end()};
  }
  void meet() { exchange("here"); }

 private:
  int rank_;
  std::string first_address_;
  Link control_;
  int port_ = 0;
};

// Sends everything and closes this end. Both ranks must call it, because each waits for the other's
// last messages.
inline void close(End& end) {
  end.sender->close();
  check(end.sender->flush(patient()), "everything to go out");
}

// Returns the next failure, and drops arrivals before it.
inline Failure await_failure(End& end) {
  for (;;) {
    Item item = take(end);
    if (auto* failure = std::get_if<Failure>(&item)) {
      return std::move(*failure);
    }
  }
}

inline RdmaOptions small_slots(unsigned slots = 4) {
  RdmaOptions options;
  options.slot_bytes = 8192;
  options.slots = slots;
  return options;
}

// Runs, on both ranks, the tests whose name contains the program's argument. Exits after the first
// test that fails on either rank.
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
