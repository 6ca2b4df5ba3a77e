// Tests of channels whose peer writes invalid data into shared memory or a socket. The only effect
// must be a failure with the peer's name. The rules for single messages are tested in
// message_test.cc.
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>

#include "common/error.h"
#include "shm/channel.h"
#include "shm/ring.h"
#include "shm/segment.h"
#include "tcp/channel.h"
#include "tcp/frame.h"
#include "tests/pair.h"

namespace adaptive::testing {
namespace {

using Change = std::function<void(Message&)>;

// A valid message of a peer, with this number.
Message sound_message(std::uint64_t sequence, std::size_t size = 100, const Change& change = {}) {
  Message message = message_of(size, static_cast<int>(sequence));
  message.job = kJob;
  message.sequence = sequence;
  message.piece_bytes = size;
  if (change) {
    change(message);
  }
  return message;
}

// ---- Shared memory: the test is the peer, which creates the memory and may write anything

class FakePeer {
 public:
  explicit FakePeer(Link link) : link_(std::move(link)) {
    offer_ = link_.recv_record(4096, 5, patient(), {});
  }

  // Offers memory with the layout of a correct peer, after `change` has modified the description.
  void offer(const std::function<void(std::vector<std::uint8_t>&)>& change = {}) {
    const std::size_t entries = shm::entries_for(4);
    control_ = make_segment(shm::control_bytes(entries), "control", patient(), {});
    data_ = make_segment(4 * 4096, "data", patient(), {});
    std::vector<std::uint8_t> bytes = offer_.bytes;
    if (change) {
      change(bytes);
    }
    const ScopedFd credit(::eventfd(0, EFD_NONBLOCK));
    link_.send_record(bytes,
                      {control_.fd.get(), data_.fd.get(), credit.get(), bell_.fd(), credit.get()},
                      patient(), {});
  }

  void meet() {
    link_.send_record({1}, {}, patient(), {});
    link_.recv_record(1, 0, patient(), {});
  }

  shm::Entry* entries() {
    return reinterpret_cast<shm::Entry*>(control_.region.data() + sizeof(shm::Control));
  }
  shm::Control* control() { return reinterpret_cast<shm::Control*>(control_.region.data()); }
  // The memory that the other end created.
  shm::Control* their_control() {
    if (theirs_.data() == nullptr) {
      theirs_ = MappedRegion::shared(offer_.fds[0].get(), sizeof(shm::Control));
    }
    return reinterpret_cast<shm::Control*>(theirs_.data());
  }

  void publish(std::uint64_t number, const Message& message, unsigned slot) {
    shm::Entry& entry = entries()[(number - 1) % shm::entries_for(4)];
    entry.slot = slot;
    std::memcpy(entry.front, &message, shm::kFrontBytes);
    std::memcpy(entry.back, reinterpret_cast<const char*>(&message) + shm::kFrontBytes,
                sizeof(entry.back));
    entry.number.store(number);
  }

 private:
  Link link_;
  Link::Record offer_;
  Segment control_;
  Segment data_;
  MappedRegion theirs_;
  Bell bell_;
};

// A real end with rank 1 whose peer is a fake.
struct ShmVictim {
  explicit ShmVictim(const std::function<void(FakePeer&)>& greet = greet_well) {
    ShmOptions options;
    options.slots = 4;
    options.slot_bytes = 4096;
    Ends ends = link_up(Kind::kUnix);
    end.session = make_session(1);
    std::exception_ptr thrown;
    {
      const Joined opening([&] {
        try {
          end.sender = open_shm(end.session, std::move(ends.near), options, patient(), kNoTick);
        } catch (...) {
          thrown = std::current_exception();
        }
      });
      try {
        fake = std::make_unique<FakePeer>(std::move(ends.far));
        greet(*fake);
      } catch (const Error&) {  // the other end's error has more details
        fake.reset();
      }
    }
    if (thrown) {
      std::rethrow_exception(thrown);
    }
    check(fake != nullptr, "a peer that was heard out");
  }

  static void greet_well(FakePeer& fake) {
    fake.offer();
    fake.meet();
  }

  std::unique_ptr<FakePeer> fake;
  End end;
};

TEST(shm_nonsense_is_a_failure_with_a_name) {
  const auto refused = [](const Change& change, unsigned slot, const std::string& words) {
    ShmVictim victim;
    victim.fake->publish(1, sound_message(0), 0);
    victim.fake->publish(2, sound_message(1, 100, change), slot);
    check(take_arrival(victim.end).message.sequence == 0, "the sound message first");
    const Failure failure = take_failure(victim.end);
    check(failure.kind == Failure::Kind::kTransport && failure.peer == 0, "a broken channel");
    check_contains(failure.text, "the channel from rank 0 (stage 5) is broken");
    check_contains(failure.text, words);
    check_throws<Error>([&] { send_pattern(*victim.end.sender, 1, 0); }, "is broken");
    check(!victim.end.session.completions->poll().has_value(), "said once");
  };
  refused([](Message& m) { m.magic = 1; }, 1, "magic");
  refused([](Message& m) { m.has_crc = 1; }, 1, "checksum");
  refused([](Message& m) { m.sequence = 3; }, 1, "number 1");
  refused({}, 4, "slot 4");
  refused({}, shm::kNoSlot, "where number");
  refused([](Message& m) { m = sound_message(1, 5000); }, 1, "room for 4096");
  refused([](Message& m) { m.piece_bytes = m.offset = 50; }, 1, "was not expected");
  refused(
      [](Message& m) {
        m = sound_message(1, std::size_t{1} << 33);
        m.piece_bytes = 4096;
      },
      1, "more than the limit");
}

TEST(a_half_message_that_ends_is_a_failure) {
  ShmVictim victim;
  victim.fake->publish(1, sound_message(0, 100, [](Message& m) { m.piece_bytes = 50; }), 0);
  const auto as_end = [](Message& m) { m.kind = MessageKind::kEnd; };
  victim.fake->publish(2, sound_message(0, 0, as_end), shm::kNoSlot);
  check_contains(take_failure(victim.end).text, "was expected");
}

// A peer that returns slots that were never sent must not free any other slots.
TEST(foreign_returns_free_nothing) {
  ShmVictim victim;
  auto reserved = victim.end.sender->reserve(10);
  for (int i = 0; i < 3; ++i) {
    send_pattern(*victim.end.sender, 10, i);
  }
  send_pattern(*victim.end.sender, 10, 3);
  check(victim.end.sender->pending() == 1, "no free slot");
  victim.fake->their_control()->returns.returned.store(1);  // the reserved slot
  check(!victim.end.sender->flush(soon()), "the reserved slot is not given to others");
  victim.fake->their_control()->returns.returned.store(~std::uint64_t{0});
  check(victim.end.sender->flush(patient()), "those that were out are free");
}

TEST(shm_offers_that_do_not_fit) {
  const std::vector<std::pair<std::size_t, std::uint64_t>> changes{
      {0, 1},  // magic
      {8, 2},  // version, and no slots
      {8, 1 | std::uint64_t{65} << 32},
      {16, 0},                  // slot_bytes
      {16, 5000},               // above the stride
      {24, ~std::uint64_t{0}},  // stride
      {24, 4096 * 2},           // larger than the memory
      {32, 1000},               // entries
      {40, 64},                 // control_bytes
      {40, 1ULL << 50},         // more than the entries need
      {48, 1ULL << 50},         // data_bytes, more than the slots need
      {40, 1 << 20},            // not the file's size
      {48, 1 << 20},            // data_bytes, not the file's size
      {56, 1},                  // job
  };
  for (const auto& [offset, value] : changes) {
    const auto change = [offset = offset, value = value](std::vector<std::uint8_t>& bytes) {
      std::memcpy(bytes.data() + offset, &value, sizeof(value));
    };
    check_throws<Error>([&] { ShmVictim victim([&](FakePeer& fake) { fake.offer(change); }); }, "");
  }
  const auto cut = [](std::vector<std::uint8_t>& bytes) { bytes.resize(10); };
  check_throws<Error>([&] { ShmVictim victim([&](FakePeer& fake) { fake.offer(cut); }); },
                      "has 10 bytes");
}

TEST(memory_whose_size_may_change_is_refused) {
  const ScopedFd fd(::memfd_create("test", MFD_ALLOW_SEALING));
  check(::ftruncate(fd.get(), 4096) == 0, "ftruncate");
  check_throws<Error>([&] { attach_segment(fd, 4096, "x"); }, "sealed");
}

// ---- TCP

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
  Frames& message(std::size_t nbytes, std::uint64_t sequence, const Change& change = {}) {
    const Message message = sound_message(sequence, nbytes, change);
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

// A real end with rank 1. Its peer sends `offer`, and then bytes that a test chooses.
struct TcpVictim {
  explicit TcpVictim(const TcpOptions& options = {},
                     const std::vector<std::uint8_t>& offer = tcp::encode_offer(good_offer())) {
    Ends ends = link_up(Kind::kTcp4);
    ends.far.send_record(offer, {}, patient(), kNoTick);
    peer = std::move(ends.far);
    end.session = make_session(1);
    end.sender = open_tcp(end.session, std::move(ends.near), options, patient(), kNoTick);
  }
  void hear(const Frames& frames) {
    check(::send(peer.fd(), frames.bytes.data(), frames.bytes.size(), MSG_NOSIGNAL) ==
              static_cast<ssize_t>(frames.bytes.size()),
          "room");
  }

  Link peer;
  End end;
};

// Returns the error that the channel reports for `frames`.
Failure said_to(const Frames& frames) {
  TcpOptions options;
  options.slots = 2;
  options.limit_bytes = 1 << 20;
  TcpVictim victim(options);
  victim.hear(frames);
  std::vector<Arrival> held;  // no slot is returned
  for (;;) {
    Item item = take(victim.end);
    if (auto* failure = std::get_if<Failure>(&item)) {
      check_contains(failure->text, "rank 0 (stage 5)");
      return std::move(*failure);
    }
    held.push_back(std::move(std::get<Arrival>(item)));
  }
}

TEST(broken_frames_are_refused) {
  using tcp::FrameType;
  const auto refused = [](const Frames& frames, const std::string& words) {
    const Failure failure = said_to(frames);
    check_contains(failure.text, words);
    check(failure.kind == Failure::Kind::kTransport, "a failure of the transport");
  };
  const auto start = [](std::uint32_t piece_bytes) {
    return Frames().frame(FrameType::kStart, 0, piece_bytes);
  };
  refused(Frames().fill(100), "bytes that are not a frame");
  refused(Frames().frame(static_cast<FrameType>(9), 0, 0), "unknown type 9");
  refused(Frames().frame(FrameType::kControl, 0, 1), "a piece of 1 bytes");
  refused(start(0x7fffffff), "a piece of 2147483647 bytes");
  refused(Frames().frame(FrameType::kControl, 1, 0), "returned 1 slots where 0 were in use");
  refused(Frames().frame(FrameType::kControl, 0xffff'ffff, 0), "slots where 0 were in use");
  refused(Frames().frame(FrameType::kMore, 0, 5).fill(5), "where 0 were expected");
  refused(start(10).message(10, 1), "where message 0 was expected");
  refused(start(11).message(10, 0), "a first piece of 11 bytes");
  refused(start(0).message(10, 0), "a first piece of 0 bytes");
  refused(start(10).message(10, 0, [](Message& m) { m.shape[0] = 11; }), "do not agree");
  refused(start(5).message(10, 0, [](Message& m) { m.piece_bytes = 5; }), "a piece of 5 of 10");
  refused(start(1 << 20).message((1 << 20) + 1, 0), "room for 1048576");
  refused(start(10).message(20, 0).fill(10).frame(FrameType::kMore, 0, 11),
          "11 bytes where 10 were expected");
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
          "was corrupted in transit");
}

TEST(an_end_within_a_message_is_a_loss) {
  TcpVictim victim;
  victim.hear(Frames().frame(tcp::FrameType::kStart, 0, 500).message(1000, 0).fill(100));
  victim.peer = Link();
  check(take_failure(victim.end).kind == Failure::Kind::kPeerLost, "a lost peer");
}

TEST(opening_checks_the_other_end) {
  const auto refused = [](const std::vector<std::uint8_t>& bytes, const std::string& words) {
    check_throws<Error>([&] { TcpVictim({}, bytes); }, words);
  };
  tcp::Offer offer = good_offer();
  offer.job = 5;
  refused(encode_offer(offer), "job 5, this one is ");
  offer = good_offer();
  offer.slots = 0;
  refused(encode_offer(offer), "0 slots");
  offer.slots = 65;
  refused(encode_offer(offer), "65 slots");
  offer = good_offer();
  offer.slot_bytes = std::uint64_t{1} << 50;
  refused(encode_offer(offer), "2 slots of 1125899906842624 bytes");
  for (const int limit_ms : {1, 2'000'000'000}) {
    offer = good_offer();
    offer.silent_limit = milliseconds(limit_ms);
    refused(encode_offer(offer), "a time limit of " + std::to_string(limit_ms) + " ms");
  }
  refused(std::vector<std::uint8_t>(tcp::kOfferBytes, 1), "something other");
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

TEST(what_the_peer_would_refuse_is_refused_by_the_sender) {
  TcpVictim victim;
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
