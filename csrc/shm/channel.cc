#include "shm/channel.h"

#include <sys/epoll.h>

#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/channel_state.h"
#include "common/copy.h"
#include "common/error.h"
#include "common/reactor.h"
#include "cuda/agreement.h"
#include "shm/device_sender.h"
#include "shm/distance.h"
#include "shm/incoming.h"
#include "shm/limits.h"
#include "shm/outgoing.h"

namespace adaptive {
namespace shm {
namespace {

// Processors whose distance is at least this long do not share a cache.
constexpr double kFarNs = 115.0;
// From this size on, bypassing the caches is faster than waiting for lines in the receiver's
// caches.
constexpr std::size_t kStreamNearBytes = 4096;
constexpr std::size_t kStreamFarBytes = 2048;

// An Offer is sent together with five descriptors: control, data, credit (for the sender's
// reactor), and bell and wake (which wake this process as a receiver).
constexpr std::size_t kNumDescriptors = 5;

struct Peer {
  Offer offer;
  std::vector<ScopedFd> fds;
};

void send_offer(Link& link, const Session& session, const ShmOptions& options,
                const OutgoingMemory& memory, int wake_fd, const Deadline& deadline,
                const Tick& tick) {
  Offer offer;
  offer.slots = options.slots;
  offer.slot_bytes = options.slot_bytes;
  offer.slot_stride = memory.slot_stride;
  offer.num_entries = memory.num_entries;
  offer.control_bytes = memory.control_segment.region.size_bytes();
  offer.data_bytes = memory.data_segment.region.size_bytes();
  offer.job = session.job;
  std::vector<std::uint8_t> bytes(sizeof(offer));
  std::memcpy(bytes.data(), &offer, sizeof(offer));
  link.send_record(bytes,
                   {memory.control_segment.fd.get(), memory.data_segment.fd.get(),
                    memory.credit_fd.get(), session.completions->bell().fd(), wake_fd},
                   deadline, tick);
}

[[noreturn]] void refuse(const std::string& peer_name, const std::string& finding) {
  throw Error("the shared memory that " + peer_name + " offers is not usable: " + finding +
              "; do both ranks run the same version?");
}

// Returns whether `bytes` is `needed`, possibly rounded up to huge pages.
bool is_about(std::uint64_t bytes, std::uint64_t needed) {
  return bytes >= needed && bytes - needed < kHugePageBytes;
}

Peer receive_offer(Link& link, const Session& session, const std::string& peer_name,
                   const Deadline& deadline, const Tick& tick) {
  Link::Record record = link.recv_record(sizeof(Offer), kNumDescriptors, deadline, tick);
  Offer offer;
  if (record.bytes.size() != sizeof(offer)) {
    refuse(peer_name, "its description has " + std::to_string(record.bytes.size()) + " bytes");
  }
  std::memcpy(&offer, record.bytes.data(), sizeof(offer));
  if (offer.magic != kControlMagic || offer.version != kControlVersion) {
    refuse(peer_name, "its version is " + std::to_string(offer.version) + ", not " +
                          std::to_string(kControlVersion));
  }
  if (offer.job != session.job) {
    refuse(peer_name, "it is of job " + std::to_string(offer.job));
  }
  const bool numbers_agree =
      offer.slots >= 1 && offer.slots <= kMostSlots && offer.slot_bytes >= 1 &&
      offer.slot_bytes <= kLargestSlotBytes && offer.slot_bytes <= offer.slot_stride &&
      offer.slot_stride % kLine == 0 && offer.slot_stride <= offer.data_bytes / offer.slots &&
      offer.num_entries == entries_for(offer.slots) &&
      is_about(offer.data_bytes, offer.slots * offer.slot_stride) &&
      is_about(offer.control_bytes, control_bytes(offer.num_entries));
  if (!numbers_agree) {
    refuse(peer_name, "its numbers do not agree: " + std::to_string(offer.slots) + " slots of " +
                          std::to_string(offer.slot_bytes) + " bytes, " +
                          std::to_string(offer.slot_stride) + " apart, in " +
                          std::to_string(offer.data_bytes) + " bytes");
  }
  return {offer, std::move(record.fds)};
}

bool is_far(double distance_ns) {
  return distance_ns >= kFarNs;
}

std::size_t stream_threshold(double distance_ns) {
  return is_far(distance_ns) ? kStreamFarBytes : kStreamNearBytes;
}

// Both directions of a pair.
class ShmSender final : public Sender {
 public:
  ShmSender(const Session& session, Link link, const ShmOptions& options, const Deadline& deadline,
            const Tick& tick)
      : session_(session),
        options_(options),
        channel_state_(std::make_shared<ChannelState>(session, link.peer())),
        wake_fd_(make_eventfd()) {
    const std::string purpose = "the channel from rank " + std::to_string(session.rank) + " to " +
                                channel_state_->peer_name() + " (" + std::to_string(options.slots) +
                                " slots of " + bytes_text(options.slot_bytes) + ")";
    memory_ = std::make_shared<OutgoingMemory>(options, purpose, deadline, tick);
    send_offer(link, session, options, *memory_, wake_fd_.get(), deadline, tick);
    Peer peer = receive_offer(link, session, channel_state_->peer_name(), deadline, tick);
    MappedRegion control = attach_segment(peer.fds[0], peer.offer.control_bytes, purpose);
    MappedRegion data = attach_segment(peer.fds[1], peer.offer.data_bytes, purpose);
    // Both ends have finished their slow steps. This call synchronizes them.
    cuda::Agreement agreement = cuda::agree(link, wish(), deadline, tick);
    device_refusal_ = std::move(agreement.reason);
    const bool leader = session.rank < link.peer();
    distance_ns_ = measure_distance_ns(
        leader ? memory_->control() : reinterpret_cast<Control*>(control.data()), leader);
    incoming_ = std::make_shared<Incoming>(channel_state_, options.limit_bytes, peer.offer,
                                           std::move(control), std::move(data),
                                           std::move(peer.fds[2]), is_far(distance_ns_));
    outgoing_ = std::make_unique<Outgoing>(session, channel_state_, options, memory_);
    outgoing_->connect(Bell::attach(std::move(peer.fds[3])), std::move(peer.fds[4]),
                       stream_threshold(distance_ns_), [this] { watch_->say_goodbye(); });
    if (agreement.path) {
      device_bytes_ = agreement.path->arena.size_bytes();
      incoming_->use_device(std::move(agreement.path->arena), link.open_process());
      device_sender_ = std::make_unique<DeviceSender>(
          channel_state_, *outgoing_, std::move(agreement.path->context),
          std::move(agreement.path->peer), std::move(agreement.path->stream), options.slot_bytes);
    }
    start(std::move(link));
  }

  ShmSender(const ShmSender&) = delete;
  ShmSender& operator=(const ShmSender&) = delete;

  ~ShmSender() override {
    if (!channel_state_->in_maker()) {
      // Threads, descriptors of the reactor and the peer belong to the process that created this
      // object.
      static_cast<void>(watch_.release());
      static_cast<void>(device_sender_.release());
      return;
    }
    stop();
    incoming_->stop();
  }

  void send(Message message, const void* data, const Keeper& keeper) override {
    channel_state_->check_process();
    outgoing_->send(message, data, keeper);
  }

  std::optional<Reserved> reserve(std::size_t nbytes) override {
    channel_state_->check_process();
    return outgoing_->reserve(nbytes);
  }

  void commit(Message message, Reserved reserved) override {
    channel_state_->check_process();
    outgoing_->commit(message, reserved.token);
  }

  void send_after(Message message, const void* data, bool on_device, void* stream,
                  const Keeper& keeper) override {
    channel_state_->check_process();
    if (device_sender_ == nullptr) {
      Sender::send_after(message, data, on_device, stream, keeper);
    }
    device_sender_->send(message, data, on_device, stream, keeper);
  }

  bool flush(const Deadline& deadline) override {
    channel_state_->check_process();
    return (device_sender_ == nullptr || device_sender_->flush(deadline)) &&
           outgoing_->flush(deadline);
  }

  std::size_t pending() const noexcept override {
    return (device_sender_ == nullptr ? 0 : device_sender_->pending()) + outgoing_->pending();
  }

  void close() noexcept override {
    if (!channel_state_->in_maker()) {
      return;
    }
    if (device_sender_ != nullptr) {
      device_sender_->close();  // closes the channel after the pending messages
    } else {
      outgoing_->close();
    }
  }

  Info info() const override {
    const MappedRegion& sent = memory_->data_segment.region;
    const MappedRegion& received = incoming_->slots();
    const auto address_of = [](const MappedRegion& region) {
      return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(region.data()));
    };
    Info info{
        {"kind", std::string("shm")},
        {"peer_closed", outgoing_->receiver_closed()},
        {"send_address", address_of(sent)},
        {"send_bytes", static_cast<std::int64_t>(sent.size_bytes())},
        {"receive_address", address_of(received)},
        {"receive_bytes", static_cast<std::int64_t>(received.size_bytes())},
        {"slot_bytes", static_cast<std::int64_t>(options_.slot_bytes)},
        {"slots", static_cast<std::int64_t>(options_.slots)},
        {"memory_bytes", static_cast<std::int64_t>(memory_->data_segment.region.size_bytes() +
                                                   memory_->control_segment.region.size_bytes())},
        {"huge_pages", std::string(memory_->data_segment.huge_pages)},
        {"copy", std::string(streaming_name())},
        {"stream_from_bytes", static_cast<std::int64_t>(stream_threshold(distance_ns_))},
        {"distance_ns", distance_ns_}};
    if (options_.cuda_device >= 0) {
      info["gpu_path"] = std::string(device_sender_ == nullptr ? "pinned" : "cuda-ipc");
      info["gpu_reason"] = device_refusal_;
      info["device_bytes"] = static_cast<std::int64_t>(device_bytes_);
    }
    return info;
  }

 private:
  cuda::Wish wish() const {
    cuda::Wish wish;
    wish.ordinal = options_.cuda_device;
    wish.library = options_.cuda_driver;
    wish.refusal = options_.cuda_refusal;
    if (options_.crc && wish.refusal.empty()) {
      wish.refusal = "checksums are enabled, which are computed on the host";
    }
    wish.slots = options_.slots;
    wish.slot_bytes = options_.slot_bytes;
    wish.job = session_.job;
    wish.rank = session_.rank;
    return wish;
  }

  void start(Link link) {
    Reactor& reactor = *session_.reactor;
    const auto on_error = [channel_state = channel_state_](const std::exception& error) {
      channel_state->fail(
          Failure::Kind::kTransport,
          "the channel to " + channel_state->peer_name() + " failed: " + error.what());
    };
    try {
      session_.completions->add(incoming_);
      reactor.add(
          memory_->credit_fd.get(), EPOLLIN, [this](std::uint32_t) { outgoing_->on_credit(); },
          on_error);
      reactor.add(wake_fd_.get(), EPOLLIN, [this](std::uint32_t) { on_wake(); }, on_error);
      watch_ = std::make_unique<LinkWatch>(reactor, std::move(link), options_.silent_limit,
                                           [this](const std::string& reason) { on_lost(reason); });
    } catch (...) {
      stop();
      throw;
    }
  }

  void stop() noexcept {
    device_sender_.reset();                              // its thread uses all other members
    session_.reactor->remove(memory_->credit_fd.get());  // the handler may use the watch
    session_.reactor->remove(wake_fd_.get());
    watch_.reset();
    session_.completions->remove(incoming_.get());
  }

  void on_wake() {
    clear(wake_fd_);
    session_.completions->drain_sources();
  }

  void on_lost(const std::string& reason) {
    channel_state_->break_off(Failure::Kind::kPeerLost,
                              channel_state_->peer_name() + " is gone: " + reason);
    outgoing_->abandon();
    incoming_->lose(reason);
  }

  const Session session_;
  const ShmOptions options_;
  const std::shared_ptr<ChannelState> channel_state_;
  const ScopedFd wake_fd_;
  std::shared_ptr<OutgoingMemory> memory_;
  std::shared_ptr<Incoming> incoming_;
  std::unique_ptr<Outgoing> outgoing_;
  double distance_ns_ = -1.0;
  std::string device_refusal_;
  std::size_t device_bytes_ = 0;
  std::unique_ptr<LinkWatch> watch_;
  std::unique_ptr<DeviceSender> device_sender_;
};

}  // namespace
}  // namespace shm

std::unique_ptr<Sender> open_shm(const Session& session, Link link, const ShmOptions& options,
                                 const Deadline& deadline, const Tick& tick) {
  check_options(options);
  return std::make_unique<shm::ShmSender>(session, std::move(link), options, deadline, tick);
}

}  // namespace adaptive
