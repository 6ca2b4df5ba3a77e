// TCP channels with a peer that speaks wrongly. Build: see tests/test_extension.py.
#include <sys/socket.h>

#include <functional>

#include "common/error.h"
#include "tcp/channel.h"
#include "tcp/frame.h"
#include "tests/pair.h"

namespace adaptive::testing {
namespace {

tcp::Offer good_offer() {
  tcp::Offer offer;
  offer.job = kJob;
  offer.slot_bytes = 1000;
  offer.limit_bytes = 1000;
  offer.slots = 2;
  offer.silent_limit = milliseconds(60'000);
  return offer;
}

struct Frames {
  Frames& frame(tcp::FrameType type, std::uint32_t credits, std::uint32_t piece_bytes) {
    std::byte header[tcp::kFrameBytes];
    tcp::encode_frame({type, credits, piece_bytes}, header);
    bytes.insert(bytes.end(), header, header + sizeof(header));
    return *this;
  }
  Frames& message(std::size_t nbytes, std::uint64_t sequence,
                  const std::function<void(Message&)>& change = {}) {
    Message message = message_of(nbytes, 0);
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
  std::vector<std::byte> bytes;
};

Open opening(const TcpOptions& options = {}) {
  return [options](const Session& session, Link link) {
    return open_tcp(session, std::move(link), options, patient(), kNoTick);
  };
}

// A real end at rank 1 whose peer sends these bytes as its options, and then what a test likes.
struct Victim {
  explicit Victim(const TcpOptions& options = {},
                  const std::vector<std::uint8_t>& offer = tcp::encode_offer(good_offer())) {
    Ends ends = link_up(Kind::kTcp4);
    ends.far.send_record(offer, {}, patient(), kNoTick);
    peer = std::move(ends.far);
    end.session = make_session(1);
    end.sender = opening(options)(end.session, std::move(ends.near));
  }
  void hear(const Frames& frames) {
    check(::send(peer.fd(), frames.bytes.data(), frames.bytes.size(), MSG_NOSIGNAL) ==
              static_cast<ssize_t>(frames.bytes.size()),
          "room");
  }

  Link peer;
  End end;
};

// What a channel says to these bytes.
Failure said_to(const Frames& frames) {
  TcpOptions options;
  options.slots = 2;
  options.limit_bytes = 1 << 20;
  Victim victim(options);
  victim.hear(frames);
  std::vector<Arrival> held;  // no slot is given back
  for (;;) {
    Item item = take(victim.end);
    if (auto* failure = std::get_if<Failure>(&item)) {
      check_contains(failure->text, "rank 0 (stage 5)");
      return std::move(*failure);
    }
    held.push_back(std::move(std::get<Arrival>(item)));
  }
}

void broken_frames_are_refused() {
  using tcp::FrameType;
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
          "within F chunk 3");
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
  Victim victim;
  victim.hear(Frames().frame(tcp::FrameType::kStart, 0, 500).message(1000, 0).fill(100));
  victim.peer = Link();
  check(take_failure(victim.end).kind == Failure::Kind::kPeerLost, "a lost peer");
}

void opening_checks_the_other_end() {
  const auto refused = [](const std::vector<std::uint8_t>& bytes, const std::string& words) {
    check_throws<Error>([&] { Victim({}, bytes); }, words);
  };
  tcp::Offer offer = good_offer();
  offer.job = 5;
  refused(encode_offer(offer), "job 5, this one is ");
  offer = good_offer();
  offer.slots = 0;
  refused(encode_offer(offer), "0 slots");
  offer.slots = 65;
  refused(encode_offer(offer), "65 slots");
  refused(std::vector<std::uint8_t>(tcp::kOfferBytes, 1), "something else");
  refused({1, 2, 3}, "3 bytes");
  refused(std::vector<std::uint8_t>(1000), "above the limit");
  const auto open = [](Ends& ends, const Deadline& deadline) {
    open_tcp(make_session(1), std::move(ends.near), {}, deadline, kNoTick);
  };
  Ends silent = link_up(Kind::kTcp4);
  check_throws<DeadlineError>([&] { open(silent, soon()); }, "rank 0");
  Ends gone = link_up(Kind::kTcp4);
  gone.far = Link();
  check_throws<Error>([&] { open(gone, patient()); }, "");
}

void what_the_peer_would_refuse_is_refused_by_the_sender() {
  Victim victim;
  Sender& sender = *victim.end.sender;
  check_throws<Error>([&] { send_pattern(sender, 1001, 1); }, "more than the limit of 1000");
  check(!sender.reserve(10), "no memory of its own");
  check_throws<Error>([&] { sender.commit(message_of(1, 0), {}); }, "committed");
  Message wrong = message_of(10, 0);
  wrong.shape[0] = 9;
  const Bytes bytes = pattern(10, 1);
  check_throws<Error>([&] { sender.send(wrong, bytes.data(), {}); }, "do not agree");
  check(std::get<std::string>(sender.info().at("kind")) == "tcp", "its kind");
}

}  // namespace
}  // namespace adaptive::testing

int main(int argc, char** argv) {
  using namespace adaptive::testing;
  const std::string only = argc > 1 ? argv[1] : "";
  run("broken frames", broken_frames_are_refused, only);
  run("end within a message", an_end_within_a_message_is_a_loss, only);
  run("opening", opening_checks_the_other_end, only);
  run("refused by the sender", what_the_peer_would_refuse_is_refused_by_the_sender, only);
  return summary();
}
