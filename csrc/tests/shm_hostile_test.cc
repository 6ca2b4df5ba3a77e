// Shared memory channels with a peer that writes nonsense. Build: see tests/test_extension.py.
#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "common/error.h"
#include "shm/channel.h"
#include "shm/ring.h"
#include "shm/segment.h"
#include "tests/pair.h"

namespace adaptive::testing {
namespace {

ShmOptions options_of(unsigned slots = 4, std::size_t slot_bytes = 4096) {
  ShmOptions options;
  options.slots = slots;
  options.slot_bytes = slot_bytes;
  return options;
}

Open opening(const ShmOptions& options) {
  return [options](const Session& session, Link link) {
    return open_shm(session, std::move(link), options, patient(), {});
  };
}

// ---- A peer that is this test: it makes the memory, and may write anything to it.

class FakePeer {
 public:
  explicit FakePeer(Link link) : link_(std::move(link)) {
    offer_ = link_.recv_record(4096, 5, patient(), {});
  }

  // Offers memory of the peer's own layout, after `change` had its way with the description.
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
  // The memory that the other end made.
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

// A real end at rank 1 whose peer is fake.
struct Victim {
  explicit Victim(const std::function<void(FakePeer&)>& greet) {
    Listener listener = listen(Kind::kUnix, rank(1));
    std::exception_ptr thrown;
    std::thread other([&] {
      try {
        fake = std::make_unique<FakePeer>(connect(listener.address(), rank(0), 1));
        greet(*fake);
      } catch (...) {
        thrown = std::current_exception();
      }
    });
    std::exception_ptr mine;
    try {
      end = open_end(1, &listener, "", opening(options_of()));
    } catch (...) {
      mine = std::current_exception();
    }
    other.join();
    if (mine) {
      std::rethrow_exception(mine);
    }
    if (thrown) {
      std::rethrow_exception(thrown);
    }
  }

  std::unique_ptr<FakePeer> fake;
  End end;
};

void greet_well(FakePeer& fake) {
  fake.offer();
  fake.meet();
}

Message sound_message(std::uint64_t sequence, std::size_t size = 100) {
  Message message = message_of(size, static_cast<int>(sequence));
  message.job = kJob;
  message.sequence = sequence;
  message.piece_bytes = size;
  return message;
}

void nonsense_is_a_failure_with_a_name() {
  struct Case {
    std::function<void(Message&, unsigned&)> change;
    const char* words;
  };
  const std::vector<Case> cases{
      {[](Message& m, unsigned&) { m.magic = 1; }, "magic"},
      {[](Message& m, unsigned&) { m.has_crc = 1; }, "checksum"},
      {[](Message& m, unsigned&) { m.piece_bytes = 0; }, "a piece of"},
      {[](Message& m, unsigned&) { m.sequence = 3; }, "number 1"},
      {[](Message&, unsigned& slot) { slot = 4; }, "slot 4"},
      {[](Message&, unsigned& slot) { slot = shm::kNoSlot; }, "where number"},
      {[](Message& m, unsigned&) { m = sound_message(1, 5000); }, "room for 4096"},
      {[](Message& m, unsigned&) {
         m.piece_bytes = 50;
         m.offset = 50;
       },
       "was not due"},
      {[](Message& m, unsigned&) {
         m = sound_message(1, std::size_t{1} << 33);
         m.piece_bytes = 4096;
       },
       "more than the limit"},
      {[](Message& m, unsigned&) {
         m.dimensions = 7;
         std::fill(std::begin(m.shape), std::end(m.shape), std::int64_t{1} << 40);
       },
       "do not agree"},
  };
  for (const Case& entry : cases) {
    Victim victim(greet_well);
    victim.fake->publish(1, sound_message(0), 0);
    Message message = sound_message(1);
    unsigned slot = 1;
    entry.change(message, slot);
    victim.fake->publish(2, message, slot);
    check(take_arrival(victim.end).message.sequence == 0, "the sound message first");
    const Failure failure = take_failure(victim.end);
    check(failure.kind == Failure::Kind::kTransport && failure.peer == 0, "a broken channel");
    check_contains(failure.text, "the channel from rank 0 (stage 5) is broken");
    check_contains(failure.text, entry.words);
    check_throws<Error>([&] { send_pattern(*victim.end.sender, 1, 0); }, "is broken");
    check(!victim.end.session.completions->poll().has_value(), "said once");
  }
}

void a_half_message_that_ends_is_a_failure() {
  Victim victim(greet_well);
  Message message = sound_message(0, 100);
  message.piece_bytes = 50;
  victim.fake->publish(1, message, 0);
  Message end;
  end.kind = MessageKind::kEnd;
  end.job = kJob;
  end.dimensions = 1;
  victim.fake->publish(2, end, shm::kNoSlot);
  check_contains(take_failure(victim.end).text, "was due");
}

// Returned slots that were never out, and any other value of the words that both write.
void foreign_returns_free_nothing() {
  Victim victim(greet_well);
  auto reserved = victim.end.sender->reserve(10);
  for (int i = 0; i < 3; ++i) {
    send_pattern(*victim.end.sender, 10, i);
  }
  send_pattern(*victim.end.sender, 10, 3);
  check(victim.end.sender->pending() == 1, "no free slot");
  victim.fake->their_control()->returns.returned.store(1);  // the reserved one
  check(!victim.end.sender->flush(soon()), "the reserved slot is not given to others");
  victim.fake->their_control()->returns.returned.store(~std::uint64_t{0});
  check(victim.end.sender->flush(patient()), "those that were out are free");
}

void offers_that_do_not_fit() {
  const std::vector<std::pair<std::size_t, std::uint64_t>> changes{
      {0, 1},  // magic
      {8, 2},  // version, and no slots
      {8, 1 | std::uint64_t{65} << 32},
      {16, 0},                  // slot_bytes
      {16, 5000},               // above the stride
      {24, ~std::uint64_t{0}},  // stride
      {24, 4096 * 2},           // more than the memory holds
      {32, 1000},               // entries
      {40, 64},                 // control_bytes
      {40, 1 << 20},            // not the file's size
      {48, 1 << 20},            // data_bytes, not the file's size
      {56, 1},                  // job
  };
  for (const auto& [offset, value] : changes) {
    const auto greet = [&, offset = offset, value = value](FakePeer& fake) {
      fake.offer([&](std::vector<std::uint8_t>& bytes) {
        std::memcpy(bytes.data() + offset, &value, sizeof(value));
      });
    };
    bool refused = false;
    try {
      Victim victim(greet);
    } catch (const Error& error) {
      refused = true;
    }
    check(refused, "an error for word " + std::to_string(offset));
  }
  check_throws<Error>(
      [] {
        Victim victim([](FakePeer& fake) {
          fake.offer([](std::vector<std::uint8_t>& bytes) { bytes.resize(10); });
        });
      },
      "has 10 bytes");
}

void memory_whose_size_may_change_is_refused() {
  const ScopedFd fd(::memfd_create("test", MFD_ALLOW_SEALING));
  check(::ftruncate(fd.get(), 4096) == 0, "ftruncate");
  check_throws<Error>([&] { attach_segment(fd, 4096, "x"); }, "sealed");
  check_throws<Error>([&] { Bell::attach(ScopedFd(::dup(fd.get()))); }, "sealed");
}

}  // namespace
}  // namespace adaptive::testing

int main(int argc, char** argv) {
  using namespace adaptive::testing;
  const std::string only = argc > 1 ? argv[1] : "";
  const auto test = [&only](const char* name, const std::function<void()>& body) {
    run(name, body, only);
  };
  test("nonsense", nonsense_is_a_failure_with_a_name);
  test("half message", a_half_message_that_ends_is_a_failure);
  test("foreign returns", foreign_returns_free_nothing);
  test("offers", offers_that_do_not_fit);
  test("unsealed", memory_whose_size_may_change_is_refused);
  return summary();
}
