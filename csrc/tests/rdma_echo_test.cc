// Tests rank 0 with a peer that sends everything back, such as tests/labs/pyverbs_peer.py, which
// was written from the description of the wire protocol. Built like rdma_channel_test.cc.
//
//   rdma_echo_test [PORT=21001] [SLOTS=8] [SLOT_BYTES=8192]
#include <random>

#include "tests/rdma_lab.h"

namespace {

using namespace adaptive;           // NOLINT: a test
using namespace adaptive::testing;  // NOLINT

void everything_comes_back(int port, const RdmaOptions& options) {
  const std::string list = variable("LAB_ADDRS");
  End end;
  end.session = make_session(0);
  Identity self = rank(0);
  auto listener = Listener::on_tcp(list.substr(0, list.find(',')), port, self);
  end.sender = open_rdma(end.session, listener.accept(1, "rdma", patient(), kNoTick), options,
                         patient(), kNoTick);
  std::mt19937 random(3);
  std::vector<std::size_t> sizes{
      0, 1, 127, options.slot_bytes, options.slot_bytes + 1, 20 * options.slot_bytes};
  while (sizes.size() < 300) {
    sizes.push_back(random() % (3 * options.slot_bytes));
  }
  std::size_t sent = 0;
  for (std::size_t received = 0; received < sizes.size(); ++received) {
    while (sent < sizes.size() && sent < received + 20) {
      send_pattern(*end.sender, sizes[sent], static_cast<int>(sent));
      ++sent;
    }
    check_arrival(take_arrival(end), sizes[received], static_cast<int>(received));
  }
  close(end);
  // The peer closes the channel and exits, which closes its link. This end must not report these
  // events as failures.
  check(nothing_comes(end, 300), "nothing more");
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
