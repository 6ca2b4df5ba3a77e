#include "cuda/agreement.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "common/error.h"

namespace adaptive::cuda {
namespace {

using Bytes = std::vector<std::uint8_t>;

constexpr std::chrono::seconds kLongestTrial(10);
constexpr std::size_t kTrialBytes = std::size_t{64} << 10;
constexpr std::size_t kLongestReason = 400;
constexpr std::size_t kLongestRecord = std::size_t{16} << 10;
enum : std::uint8_t { kNo = 0, kYes = 1, kNoDevice = 2 };

// Thrown at both ends, after the same exchange of records, if they cannot use a path.
struct Declined {
  std::string reason;
};

std::string printable(const std::uint8_t* bytes, std::size_t count) {
  std::string text(reinterpret_cast<const char*>(bytes), std::min(count, kLongestReason));
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return c < 0x20 || c == 0x7F; }, '?');
  return text;
}

std::uint8_t trial_byte(std::uint64_t job, int sender, unsigned slot, std::size_t i) noexcept {
  const std::uint64_t mixed =
      (job + 31U * static_cast<unsigned>(sender + 1) + 7U * slot + i) * 0x9E37'79B9'7F4A'7C15ULL;
  return static_cast<std::uint8_t>(mixed >> 56);
}

class Talk {
 public:
  Talk(Link& link, const Wish& wish, const Deadline& deadline, const Tick& tick)
      : link_(link), wish_(wish), deadline_(deadline), tick_(tick) {}

  Path come_to_terms() {
    const Bytes identity = round([this] { return identify(); });
    const Bytes exported = round([&] { return export_arena(identity); });
    try {
      round([&] { return write(exported); });
      round([&] { return read(); });
      round([&] { return see_consumed(); });
    } catch (const Declined&) {
      // Closes the peer's objects before the reply, because the peer may free them only afterwards.
      path_.peer = {};
      say(kYes, {});
      hear();
      throw;
    }
    return std::move(path_);
  }

 private:
  // Runs this end's part of a round, and then exchanges the results with the other end.
  Bytes round(const std::function<Bytes()>& part) {
    Bytes result;
    std::string failure;
    try {
      result = part();
    } catch (const Error& error) {
      failure = error.what();
    }
    if (wish_.ordinal < 0) {
      say(kNoDevice, {});
    } else if (failure.empty()) {
      say(kYes, result);
    } else {
      say(kNo, Bytes(failure.begin(), failure.begin() + static_cast<std::ptrdiff_t>(std::min(
                                                            failure.size(), kLongestReason))));
    }
    Bytes heard = hear();
    const std::uint8_t verdict = heard.front();
    if (wish_.ordinal < 0) {
      throw Declined{"payloads of this rank are in host memory"};
    }
    if (verdict == kNoDevice) {
      throw Declined{of(link_.peer()) + "its payloads are in host memory"};
    }
    if (!failure.empty()) {
      throw Declined{of(wish_.rank) + failure};
    }
    if (verdict != kYes) {
      throw Declined{of(link_.peer()) + printable(heard.data() + 1, heard.size() - 1)};
    }
    heard.erase(heard.begin());
    return heard;
  }

  static std::string of(int rank) { return "rank " + std::to_string(rank) + ": "; }

  void say(std::uint8_t verdict, const Bytes& words) {
    Bytes record(1 + words.size());
    record.front() = verdict;
    std::copy(words.begin(), words.end(), record.begin() + 1);
    link_.send_record(record, {}, deadline_, tick_);
  }

  Bytes hear() {
    Link::Record record = link_.recv_record(kLongestRecord, 0, deadline_, tick_);
    if (record.bytes.empty()) {
      throw Error("rank " + std::to_string(link_.peer()) +
                  " sent nothing about its device; do both ranks run the same version?");
    }
    return std::move(record.bytes);
  }

  Bytes identify() {
    if (wish_.ordinal < 0) {
      return {};
    }
    if (!wish_.refusal.empty()) {
      throw Error(wish_.refusal);
    }
    const auto driver = Driver::load(wish_.library);
    path_.context = std::make_shared<const Context>(driver, wish_.ordinal);
    own_ = driver->uuid(path_.context->device());
    return Bytes(std::begin(own_.bytes), std::end(own_.bytes));
  }

  Bytes export_arena(const Bytes& identity) {
    const Context& context = *path_.context;
    Uuid theirs;
    if (identity.size() != sizeof(theirs.bytes)) {
      throw Error("the peer's device has an identity of " + std::to_string(identity.size()) +
                  " bytes; do both ranks run the same version?");
    }
    std::memcpy(theirs.bytes, identity.data(), sizeof(theirs.bytes));
    if (std::memcmp(theirs.bytes, own_.bytes, sizeof(theirs.bytes)) != 0) {
      // If this process does not see the peer's device, the device may still be reachable. Only the
      // trial will show whether it is.
      const Device peer = context.driver().find(theirs);
      if (peer >= 0 && !context.driver().can_access_peer(context.device(), peer)) {
        throw Error("device " + std::to_string(context.device()) +
                    " cannot reach the memory of device " + std::to_string(peer));
      }
    }
    path_.arena = Arena(path_.context, wish_.slots, wish_.slot_bytes);
    const Current current(context);
    path_.stream = make_stream(path_.context);
    local_ = make_event(path_.context, false);
    // Fills the slots, so that their earlier contents cannot match the pattern by chance.
    for (const unsigned slot : tried()) {
      fill(path_.arena.slot(slot), [&](std::size_t i) {
        return static_cast<std::uint8_t>(~trial_byte(wish_.job, link_.peer(), slot, i));
      });
      record(path_.arena.consumed(slot), stream());
    }
    return path_.arena.export_all();
  }

  Bytes write(const Bytes& exported) {
    path_.peer = PeerArena(path_.context, exported, wish_.slots, wish_.slot_bytes);
    const Current current(*path_.context);
    const Memory scratch = allocate(path_.context, trial_bytes());
    for (const unsigned slot : tried()) {
      fill(scratch.get(),
           [&](std::size_t i) { return trial_byte(wish_.job, wish_.rank, slot, i); });
      wait(stream(), path_.peer.consumed(slot));
      copy(*path_.context, path_.peer.slot(slot), scratch.get(), trial_bytes(), stream());
      record(path_.peer.written(slot), stream());
      finish("the copy to the peer's memory");
    }
    return {};
  }

  Bytes read() {
    const Current current(*path_.context);
    Bytes found(trial_bytes());
    for (const unsigned slot : tried()) {
      wait(stream(), path_.arena.written(slot));
      path_.context->driver().check(
          path_.context->api().copy_to_host(found.data(), path_.arena.slot(slot), found.size(),
                                            stream()),
          "cuMemcpyDtoHAsync", std::to_string(found.size()) + " bytes");
      record(path_.arena.consumed(slot), stream());
      finish("the copy from the peer");
      for (std::size_t i = 0; i < found.size(); ++i) {
        if (found[i] != trial_byte(wish_.job, link_.peer(), slot, i)) {
          throw Error("byte " + std::to_string(i) + " that the peer wrote to slot " +
                      std::to_string(slot) + " came out wrong");
        }
      }
    }
    return {};
  }

  Bytes see_consumed() {
    const Current current(*path_.context);
    for (const unsigned slot : tried()) {
      wait(stream(), path_.peer.consumed(slot));
      finish("the wait for the peer's event");
    }
    return {};
  }

  template <typename ByteAt>
  void fill(Address to, const ByteAt& byte_at) {
    Bytes bytes(trial_bytes());
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      bytes[i] = byte_at(i);
    }
    path_.context->driver().check(
        path_.context->api().copy_to_device(to, bytes.data(), bytes.size(), stream()),
        "cuMemcpyHtoDAsync", std::to_string(bytes.size()) + " bytes");
    finish("a copy to the device");
  }

  // Waits for the work on the stream. This runs before training, so the time does not matter.
  void finish(const char* what) {
    record(local_, stream());
    const Deadline limit = deadline_.at_most(kLongestTrial);
    const bool done = await(local_, stream(), [&] {
      if (tick_) {
        tick_();
      }
      return limit.expired();
    });
    if (!done) {
      path_.arena.leak();  // the device may still use the arena
      throw Error(std::string(what) + " did not end within " +
                  std::to_string(kLongestTrial.count()) + " s");
    }
  }

  StreamHandle* stream() const noexcept { return path_.stream.get(); }

  std::size_t trial_bytes() const noexcept { return std::min(wish_.slot_bytes, kTrialBytes); }

  // Slots that the trial writes to: the first and the last.
  std::vector<unsigned> tried() const {
    return wish_.slots == 1 ? std::vector<unsigned>{0} : std::vector<unsigned>{0, wish_.slots - 1};
  }

  Link& link_;
  const Wish& wish_;
  const Deadline deadline_;
  const Tick& tick_;
  Path path_;
  Uuid own_{};
  Event local_;
};

}  // namespace

Agreement agree(Link& link, const Wish& wish, const Deadline& deadline, const Tick& tick) {
  Agreement agreement;
  try {
    agreement.path = Talk(link, wish, deadline, tick).come_to_terms();
  } catch (const Declined& declined) {
    agreement.reason = declined.reason;
  }
  return agreement;
}

}  // namespace adaptive::cuda
