// Rank 0 against a peer that sends everything back, such as tests/labs/pyverbs_peer.py, which was
// written from the description of the wire protocol. Built as rdma_channel_test.cc.
//
//   rdma_echo_test [PORT=21001] [SLOTS=8] [SLOT_BYTES=8192]
#include <cstdlib>
#include <random>

#include "tests/rdma_lab.h"

namespace {

using namespace adaptive;           // NOLINT: a test
using namespace adaptive::testing;  // NOLINT

void everything_comes_back(int port, const RdmaOptions& options) {
  Identity self;
  self.token.fill(9);
  self.rank = 0;
  self.purpose = "rdma";
  const std::string list = variable("LAB_ADDRS");
  Session session;
  session.completions = std::make_shared<Completions>(1);
  session.reactor = std::make_shared<Reactor>();
  session.job = kJob;
  session.rank = 0;
  auto listener = Listener::on_tcp(list.substr(0, list.find(',')), port, self);
  auto sender =
      open_rdma(session, listener.accept(1, "rdma", patient(), {}), options, patient(), {});

  std::mt19937 random(3);
  std::vector<std::size_t> sizes{
      0, 1, 127, options.slot_bytes, options.slot_bytes + 1, 20 * options.slot_bytes};
  while (sizes.size() < 300) {
    sizes.push_back(random() % (3 * options.slot_bytes));
  }
  std::size_t sent = 0;
  for (std::size_t received = 0; received < sizes.size(); ++received) {
    while (sent < sizes.size() && sent < received + 20) {
      send(*sender, sizes[sent], sent);
      ++sent;
    }
    check_arrival(next_arrival(*session.completions), sizes[received], received);
  }
  sender->close();
  check(sender->flush(patient()), "the end to reach the peer");
  // Its end, its leaving and the end of its link are no failures.
  check(!session.completions->wait(soon(300)).has_value(), "nothing more");
}

}  // namespace

int main(int argc, char** argv) {
  const int port = argc > 1 ? std::atoi(argv[1]) : 21001;
  RdmaOptions options;
  options.slots = argc > 2 ? static_cast<unsigned>(std::atoi(argv[2])) : 8;
  options.slot_bytes = argc > 3 ? static_cast<std::size_t>(std::atoi(argv[3])) : 8192;
  run("everything comes back", [&] { everything_comes_back(port, options); });
  return summary();
}
