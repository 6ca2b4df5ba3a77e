// Tests of the TCP channel where things go wrong: peers that end, stop or speak wrongly. Build: c++
// -std=c++17 -I csrc -pthread <this> csrc/tcp/*.cc csrc/common/*.cc
#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <memory>

#include "common/error.h"
#include "tcp/channel.h"
#include "tcp/frame.h"
#include "tests/check.h"
#include "tests/tcp_pair.h"

namespace adaptive::testing {
namespace {

enum class Phase { kWaiting, kSending, kReceiving };

void a_killed_peer_is_named(Phase phase) {
  Peer peer([&](Link link) {
    const Node node(0);
    const auto sender = node.open(std::move(link));
    send(*sender, payload_of(100, 1), 7);
    const Payload large = payload_of(200U << 20, 1);
    if (phase == Phase::kReceiving) {
      send(*sender, large, 8);
    }
    node.arrival();
    for (;;) {
      ::pause();
    }
  });
  const Node node(1);
  const auto sender = node.open(std::move(peer.link));
  check(node.arrival().message.microbatch == 7, "the first message");
  const Payload large = payload_of(64U << 20, 1);
  if (phase == Phase::kSending) {
    for (int i = 0; i < 40; ++i) {
      send(*sender, large, i);
    }
  }
  ::usleep(phase == Phase::kReceiving ? 3000 : 100000);
  peer.child->kill();
  const auto killed = std::chrono::steady_clock::now();
  const Failure failure = node.failure();
  check(std::chrono::steady_clock::now() - killed < std::chrono::seconds(5), "soon");
  check(failure.kind == Failure::Kind::kPeerLost && failure.peer == 0, "the loss of rank 0");
  check_contains(failure.text, "rank 0 on testhost");
  check_contains(failure.text, "F chunk 1 microbatch 7 of step 12");
  check(node.nothing_comes(), "one failure");
  check_throws<PeerLostError>([&] { send(*sender, large); }, "rank 0 on testhost");
  if (phase == Phase::kSending) {
    check_throws<PeerLostError>([&] { sender->flush(patient()); }, "rank 0 on testhost");
  }
  sender->close();
}

void a_stopped_peer_is_lost_after_the_limit() {
  TcpOptions options;
  options.silent_limit = milliseconds(400);
  Peer peer([&](Link link) {
    const Node node(0);
    const auto sender = node.open(std::move(link), options);
    for (;;) {
      ::pause();  // computes: only its reactor speaks
    }
  });
  const Node node(1);
  const auto sender = node.open(std::move(peer.link), options);
  check(node.nothing_comes(1200), "a computing peer to stay alive");
  peer.child->signal(SIGSTOP);
  const Failure failure = node.failure();
  check(failure.kind == Failure::Kind::kPeerLost, "the loss of a peer");
  check_contains(failure.text, "silent for 400 ms");
  check_contains(failure.text, "no message was received from it");
  check_throws<PeerLostError>([&] { send(*sender, payload_of(1, 1)); }, "silent for 400 ms");
}

// Loaders of data are such children: they outlive their parent.
void a_child_of_a_killed_peer_does_not_hide_its_end() {
  int raw[2];
  check(::pipe2(raw, O_CLOEXEC) == 0, "a pipe");
  ScopedFd read_end(raw[0]);
  ScopedFd write_end(raw[1]);
  Peer peer([&](Link link) {
    const Node node(0);
    const auto sender = node.open(std::move(link));
    if (::fork() == 0) {
      write_end.reset();
      char byte = 0;  // until the test is over
      [[maybe_unused]] const ssize_t got = ::read(read_end.get(), &byte, 1);
      ::_exit(0);
    }
    write_end.reset();
    send(*sender, payload_of(1, 1));
    for (;;) {
      ::pause();
    }
  });
  const Node node(1);
  const auto sender = node.open(std::move(peer.link));
  node.arrival();
  peer.child->kill();
  const Failure failure = node.failure();
  check(failure.kind == Failure::Kind::kPeerLost, "the loss of a peer");
  check_contains(failure.text, "closed without a goodbye: its process ended");
}

void an_orderly_end_is_no_failure() {
  Peer peer([](Link link) {
    const Node node(0);
    const auto sender = node.open(std::move(link));
    for (int i = 0; i < 10; ++i) {
      send(*sender, payload_of(3U << 20, 1), i);
    }
    leave(*sender);
    check_throws<Error>([&] { send(*sender, payload_of(1, 1)); }, "closed");
  });
  TcpOptions options;
  options.silent_limit = milliseconds(100);
  const Node node(1);
  const auto sender = node.open(std::move(peer.link), options);
  for (int i = 0; i < 10; ++i) {
    check(node.arrival().message.microbatch == i, "all messages before the goodbye");
  }
  peer.child->join();
  check(node.nothing_comes(500), "no failure");
  check_throws<Error>(
      [&] {
        for (const Deadline deadline = patient(); !deadline.expired(); ::usleep(1000)) {
          send(*sender, payload_of(1, 1));
        }
      },
      "closed");
}

void a_forked_child_does_not_disturb() {
  Ends ends;
  auto near = std::make_unique<Node>(1);
  auto far = std::make_unique<Node>(0);
  std::unique_ptr<Sender> there;
  Joined thread([&] { there = far->open(std::move(ends.far)); });
  auto here = near->open(std::move(ends.near));
  thread.join();
  send(*here, payload_of(100, 1));
  auto held = std::make_unique<Arrival>(far->arrival());
  Child child([&] {
    check_throws<Error>([&] { send(*here, payload_of(100, 1)); }, "forked");
    held.reset();
    here->close();
    here.reset();
    there.reset();
    near.reset();
    far.reset();
  });
  child.join();
  check(near->nothing_comes() && far->nothing_comes(), "no failure");
  send(*here, payload_of(100, 2));
  check_payload(far->arrival(), payload_of(100, 2));
}

// ---- Peers that speak wrongly

adaptive::tcp::Offer good_offer() {
  adaptive::tcp::Offer offer;
  offer.job = kJob;
  offer.slot_bytes = 1000;
  offer.limit_bytes = 1000;
  offer.slots = 2;
  offer.silent_limit = milliseconds(60'000);
  return offer;
}

struct Frames {
  Frames& frame(adaptive::tcp::FrameType type, std::uint32_t credits, std::uint32_t piece_bytes) {
    std::byte header[adaptive::tcp::kFrameBytes];
    adaptive::tcp::encode_frame({type, credits, piece_bytes}, header);
    bytes.insert(bytes.end(), header, header + sizeof(header));
    return *this;
  }
  Frames& message(std::size_t nbytes, std::uint64_t sequence,
                  const std::function<void(Message&)>& change = {}) {
    Message message = message_of(nbytes);
    message.job = kJob;
    message.sequence = sequence;
    message.piece_bytes = nbytes;
    if (change) {
      change(message);
    }
    const auto* raw = reinterpret_cast<const std::byte*>(&message);
    bytes.insert(bytes.end(), raw, raw + sizeof(message));
    return *this;
  }
  Frames& fill(std::size_t count) {
    bytes.resize(bytes.size() + count, std::byte{0x33});
    return *this;
  }
  Payload bytes;
};

// What a channel says to these bytes.
Failure said_to(const Frames& frames) {
  Ends ends;
  const Node node(1);
  TcpOptions options;
  options.slots = 2;
  options.limit_bytes = 1 << 20;
  ends.far.send_record(adaptive::tcp::encode_offer(good_offer()), {}, patient(), kNoTick);
  const auto sender = node.open(std::move(ends.near), options);
  check(::send(ends.far.fd(), frames.bytes.data(), frames.bytes.size(), MSG_NOSIGNAL) ==
            static_cast<ssize_t>(frames.bytes.size()),
        "room");
  std::vector<Arrival> held;  // no slot is given back
  for (;;) {
    Item item = node.wait();
    if (auto* failure = std::get_if<Failure>(&item)) {
      check_contains(failure->text, "rank 0 on testhost");
      return std::move(*failure);
    }
    held.push_back(std::move(std::get<Arrival>(item)));
  }
}

void broken_frames_are_refused() {
  using adaptive::tcp::FrameType;
  const auto refused = [](const Frames& frames, const std::string& words) {
    const Failure failure = said_to(frames);
    check_contains(failure.text, words);
    check(failure.kind == Failure::Kind::kTransport, "a failure of the transport");
  };
  const auto start = [](std::uint32_t piece_bytes) {
    return Frames().frame(FrameType::kStart, 0, piece_bytes);
  };
  refused(Frames().fill(100), "other bytes than a frame");
  refused(Frames().frame(static_cast<FrameType>(9), 0, 0), "unknown type 9");
  refused(Frames().frame(FrameType::kControl, 0, 1), "a piece of 1 bytes");
  refused(start(0x7fffffff), "a piece of 2147483647 bytes");
  refused(Frames().frame(FrameType::kControl, 1, 0), "gave 1 slots back where 0 were in use");
  refused(Frames().frame(FrameType::kControl, 0xffff'ffff, 0), "slots back");
  refused(Frames().frame(FrameType::kMore, 0, 5).fill(5), "where 0 were due");
  refused(start(10).message(10, 1), "where message 0 was due");
  refused(start(11).message(10, 0), "a first piece of 11 bytes");
  refused(start(0).message(10, 0), "a first piece of 0 bytes");
  refused(start(10).message(10, 0, [](Message& m) { m.job = 1; }), "job 1");
  refused(start(10).message(10, 0, [](Message& m) { m.magic = 1; }), "magic 1");
  refused(start(10).message(10, 0, [](Message& m) { m.shape[0] = 11; }), "do not agree");
  refused(start(10).message(10, 0, [](Message& m) { m.offset = 1; }), "a piece of 10 bytes at 1");
  refused(start(5).message(10, 0, [](Message& m) { m.piece_bytes = 5; }), "a piece of 5 of 10");
  refused(start(1 << 20).message((1 << 20) + 1, 0), "room for 1048576");
  refused(start(10).message(20, 0).fill(10).frame(FrameType::kMore, 0, 11),
          "11 bytes where 10 were due");
  refused(start(10).message(20, 0).fill(10).frame(FrameType::kStart, 0, 1).message(1, 1),
          "within F chunk 1");
  refused(start(10).message(20, 0).fill(10).frame(FrameType::kGoodbye, 0, 0), "a goodbye within");
  refused(Frames().frame(FrameType::kGoodbye, 0, 0).frame(FrameType::kStart, 0, 1).message(1, 0),
          "after its goodbye");
  refused(start(1)
              .message(1, 0)
              .fill(1)
              .frame(FrameType::kStart, 0, 0)
              .message(0, 1)
              .frame(FrameType::kStart, 0, 1)
              .message(1, 2),
          "no slot was free");
  refused(start(10)
              .message(10, 0,
                       [](Message& m) {
                         m.has_crc = 1;
                         m.crc = 4711;
                       })
              .fill(10),
          "was changed on its way");
}

void an_end_within_a_message_is_a_loss() {
  Ends ends;
  const Node node(1);
  ends.far.send_record(adaptive::tcp::encode_offer(good_offer()), {}, patient(), kNoTick);
  const auto sender = node.open(std::move(ends.near));
  const Frames frames =
      Frames().frame(adaptive::tcp::FrameType::kStart, 0, 500).message(1000, 0).fill(100);
  check(::send(ends.far.fd(), frames.bytes.data(), frames.bytes.size(), 0) > 0, "room");
  ends.far = Link();
  check(node.failure().kind == Failure::Kind::kPeerLost, "a lost peer");
}

void opening_checks_the_other_end() {
  const auto refused = [](std::vector<std::uint8_t> bytes, const std::string& words) {
    Ends ends;
    const Node node(1);
    ends.far.send_record(bytes, {}, patient(), kNoTick);
    check_throws<Error>([&] { node.open(std::move(ends.near)); }, words);
  };
  adaptive::tcp::Offer offer = good_offer();
  offer.job = 5;
  refused(encode_offer(offer), "job 5, this one is 99");
  offer = good_offer();
  offer.slots = 0;
  refused(encode_offer(offer), "0 slots");
  offer.slots = 65;
  refused(encode_offer(offer), "65 slots");
  refused(std::vector<std::uint8_t>(adaptive::tcp::kOfferBytes, 1), "something else");
  refused({1, 2, 3}, "3 bytes");
  refused(std::vector<std::uint8_t>(1000), "above the limit");
  {
    Ends ends;
    const Node node(1);
    check_throws<DeadlineError>(
        [&] { open_tcp(node.session, std::move(ends.near), {}, soon(), kNoTick); }, "rank 0");
  }
  {
    Ends ends;
    const Node node(1);
    ends.far = Link();
    check_throws<Error>([&] { node.open(std::move(ends.near)); }, "");
  }
  Ends ends;
  const Node node(1);
  TcpOptions options;
  options.slots = 65;
  check_throws<std::invalid_argument>([&] { node.open(std::move(ends.near), options); }, "65");
}

void too_large_a_message_is_refused_by_the_sender() {
  Ends ends;
  const Node node(1);
  ends.far.send_record(adaptive::tcp::encode_offer(good_offer()), {}, patient(), kNoTick);
  const auto sender = node.open(std::move(ends.near));
  check_throws<Error>([&] { send(*sender, payload_of(1001, 1)); }, "more than the 1000");
  check(!sender->reserve(10), "no memory of its own");
  check_throws<Error>([&] { sender->commit(message_of(1), {}); }, "committed");
  Message wrong = message_of(10);
  wrong.shape[0] = 9;
  check_throws<Error>([&] { sender->send(wrong, payload_of(10, 1).data(), {}); }, "do not agree");
  check(std::get<std::string>(sender->info().at("kind")) == "tcp", "its kind");
}

void run_all(const std::string& only) {
  const auto run = [&](const std::string& name, const std::function<void()>& test) {
    testing::run(name, test, only);
  };
  run("killed while this end waits", [] { a_killed_peer_is_named(Phase::kWaiting); });
  run("killed while this end sends", [] { a_killed_peer_is_named(Phase::kSending); });
  run("killed while this end receives", [] { a_killed_peer_is_named(Phase::kReceiving); });
  run("stopped peer", a_stopped_peer_is_lost_after_the_limit);
  run("child of a killed peer", a_child_of_a_killed_peer_does_not_hide_its_end);
  run("orderly end", an_orderly_end_is_no_failure);
  run("forked child", a_forked_child_does_not_disturb);
  run("broken frames", broken_frames_are_refused);
  run("end within a message", an_end_within_a_message_is_a_loss);
  run("opening", opening_checks_the_other_end);
  run("too large", too_large_a_message_is_refused_by_the_sender);
}

}  // namespace
}  // namespace adaptive::testing

int main(int argc, char** argv) {
  adaptive::testing::run_all(argc > 1 ? argv[1] : "");
  return adaptive::testing::summary();
}
