#include "shm/incoming.h"

#include <cstring>
#include <new>
#include <utility>

#include "common/copy.h"
#include "common/error.h"

namespace adaptive::shm {
namespace {

// A distant sender that computes into a slot has to wait for every cache line that this processor's
// caches still hold, which takes five times longer than flushing the lines first. Larger payloads
// have already left the caches.
constexpr std::uint64_t kMostFlushedBytes = std::uint64_t{512} << 10;

}  // namespace

// Owner of a message that was assembled from pieces.
struct Incoming::Assembled {
  Assembled(std::shared_ptr<Incoming> incoming, Lease memory_in)
      : channel(std::move(incoming)), memory(std::move(memory_in)) {
    channel->num_assembled_.fetch_add(1);
  }
  Assembled(const Assembled&) = delete;
  Assembled& operator=(const Assembled&) = delete;
  ~Assembled() {
    channel->num_assembled_.fetch_sub(1);
    if (channel->stalled_.load() && channel->channel_state_->in_maker()) {
      if (const auto completions = channel->channel_state_->completions()) {
        completions->bell().ring();
      }
    }
  }

  std::shared_ptr<Incoming> channel;
  Lease memory;
};

Incoming::Incoming(std::shared_ptr<ChannelState> channel_state, std::uint64_t limit_bytes,
                   const Offer& layout, MappedRegion control, MappedRegion data, ScopedFd credit_fd,
                   bool flush_computed)
    : channel_state_(std::move(channel_state)),
      layout_(layout),
      control_region_(std::move(control)),
      data_region_(std::move(data)),
      control_(reinterpret_cast<Control*>(control_region_.data())),
      entries_(reinterpret_cast<const Entry*>(control_region_.data() + sizeof(Control))),
      credit_fd_(std::move(credit_fd)),
      flush_computed_(flush_computed),
      assembler_(limit_bytes) {}

Incoming::~Incoming() {
  if (!channel_state_->in_maker()) {
    static_cast<void>(device_.release());  // the thread and the device belong to the parent
  }
}

void Incoming::use_device(cuda::Arena arena, ScopedFd sender) {
  device_ = std::make_unique<DeviceSlots>(
      std::move(arena), std::move(sender), [this](unsigned slot) { give_back(slot); },
      [this] { return importer(); },
      [channel_state = channel_state_](const char* reason) {
        channel_state->fail(Failure::Kind::kTransport, "the device's end of the channel from " +
                                                           channel_state->peer_name() +
                                                           " failed: " + reason);
      });
}

DeviceSlots::Importer Incoming::importer() const noexcept {
  if (control_->sender.device_closed.load() != 0) {
    return DeviceSlots::Importer::kClosed;
  }
  const bool lost = lost_.load(std::memory_order_acquire);
  return lost ? DeviceSlots::Importer::kLost : DeviceSlots::Importer::kThere;
}

bool Incoming::poll(Completions& into) noexcept {
  bool found_any = false;
  try {
    while (!finished_ && take_next(into)) {
      found_any = true;
    }
  } catch (const std::exception& error) {
    finished_ = true;
    found_any = true;
    channel_state_->fail(
        Failure::Kind::kTransport,
        "the channel from " + channel_state_->peer_name() + " is broken: " + error.what());
  }
  if (!finished_ && lost_.load(std::memory_order_acquire) && !stalled_.load()) {
    // Entries that the peer wrote before it ended were visible before its loss was noticed, so one
    // more check is enough.
    const Entry& entry = entries_[taken_ & (layout_.num_entries - 1)];
    if (entry.number.load(std::memory_order_acquire) != taken_ + 1) {
      tell_loss();
    }
    found_any = true;
  }
  return found_any;
}

void Incoming::read(const Entry& entry, Message* message, unsigned* slot,
                    std::uint32_t* flags) const {
  // The entry is copied once, and the copy is both checked and used, because the peer may write the
  // original at any time. The fence prevents the compiler from reading the original again.
  auto* const bytes = reinterpret_cast<unsigned char*>(message);
  *slot = entry.slot;
  *flags = entry.flags;
  std::memcpy(bytes, entry.front, kFrontBytes);
  if (message->dimensions > kFrontDimensions) {
    std::memcpy(bytes + kFrontBytes, entry.back, sizeof(entry.back));
  } else {
    std::memset(bytes + kFrontBytes, 0, sizeof(entry.back));
  }
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

void Incoming::check_entry(const Message& message, unsigned slot) const {
  check_message(message, channel_state_->job(), layout_.slot_bytes, channel_state_->peer());
  const bool end = message.kind == MessageKind::kEnd;
  if (message.sequence != sequence_ || (end ? slot != kNoSlot : slot >= layout_.slots) ||
      (end && assembler_.busy())) {
    throw Error("message " + std::to_string(message.sequence) + " in slot " + std::to_string(slot) +
                " where number " + std::to_string(sequence_) + " in one of " +
                std::to_string(layout_.slots) + " slots was expected");
  }
  if (message.has_crc != 0 && !end &&
      crc32c(data_region_.data() + slot * layout_.slot_stride, message.piece_bytes) !=
          message.crc) {
    throw Error(describe(message) + " does not have the checksum it was sent with");
  }
}

// Takes the next entry if there is one. Throws Error if the entry breaks the rules.
bool Incoming::take_next(Completions& into) {
  const Entry& entry = entries_[taken_ & (layout_.num_entries - 1)];
  if (entry.number.load(std::memory_order_acquire) != taken_ + 1) {
    return false;
  }
  Message message;
  unsigned slot = kNoSlot;
  std::uint32_t flags = 0;
  read(entry, &message, &slot, &flags);
  check_entry(message, slot);
  if (message.kind == MessageKind::kEnd) {
    ++taken_;
    finished_ = true;
    return false;
  }
  const bool whole = message.piece_bytes == message.nbytes && !assembler_.busy();
  if ((flags & kOnDevice) != 0 && (device_ == nullptr || !whole)) {
    throw Error(describe(message) + " is marked as in device memory, but " +
                (whole ? "this channel has no device memory" : "it has several pieces"));
  }
  if (whole) {
    ++taken_;
    ++sequence_;
    deliver(message, slot, flags, into);
  } else {
    if (message.offset == 0 && num_assembled_.load() >= layout_.slots) {
      stalled_.store(true);
      if (num_assembled_.load() >= layout_.slots) {
        return false;  // the pieces remain in their slots
      }
    }
    stalled_.store(false);
    ++taken_;
    add_piece(message, slot, into);
  }
  channel_state_->note_received(message);
  return true;
}

void Incoming::deliver(const Message& message, unsigned slot, std::uint32_t flags,
                       Completions& into) {
  const bool on_device = (flags & kOnDevice) != 0;
  const bool flush = flush_computed_ && (flags & kComputedInPlace) != 0 &&
                     message.piece_bytes <= kMostFlushedBytes;
  flush_bytes_[slot].store(flush ? static_cast<std::uint32_t>(message.piece_bytes) : 0,
                           std::memory_order_relaxed);
  std::byte* const data =
      on_device ? device_->data(slot) : data_region_.data() + slot * layout_.slot_stride;
  Arrival arrival;
  arrival.peer = channel_state_->peer();
  arrival.message = message;
  arrival.payload = Lease(data, message.nbytes, shared_from_this(),
                          on_device ? &Incoming::release_on_device : &Incoming::release, slot);
  num_held_.fetch_add(1, std::memory_order_relaxed);
  arrival.slots = layout_.slots;
  arrival.held = &num_held_;
  arrival.device = on_device ? device_.get() : nullptr;
  arrival.slot = slot;
  into.found(std::move(arrival));
}

void Incoming::add_piece(const Message& message, unsigned slot, Completions& into) {
  auto whole = assembler_.add(message, data_region_.data() + slot * layout_.slot_stride,
                              channel_state_->peer());
  give_back(slot);
  if (!whole) {
    return;
  }
  ++sequence_;
  std::byte* const data = whole->payload.data();
  auto owner = std::make_shared<Assembled>(shared_from_this(), std::move(whole->payload));
  whole->payload = Lease(data, message.nbytes, std::move(owner), nullptr, 0);
  whole->slots = layout_.slots;
  whole->held = &num_assembled_;
  into.found(std::move(*whole));
}

void Incoming::release(void* owner, std::uint64_t token) noexcept {
  auto* const self = static_cast<Incoming*>(owner);
  if (!self->channel_state_->in_maker()) {
    return;
  }
  const auto slot = static_cast<unsigned>(token);
  flush_lines(self->data_region_.data() + slot * self->layout_.slot_stride,
              self->flush_bytes_[slot].load(std::memory_order_relaxed));
  self->num_held_.fetch_sub(1, std::memory_order_relaxed);
  self->give_back(slot);
}

void Incoming::release_on_device(void* owner, std::uint64_t token) noexcept {
  auto* const self = static_cast<Incoming*>(owner);
  if (self->channel_state_->in_maker()) {
    self->num_held_.fetch_sub(1, std::memory_order_relaxed);
    self->device_->leave(static_cast<unsigned>(token));
  }
}

void Incoming::give_back(unsigned slot) noexcept {
  control_->returns.returned.fetch_or(std::uint64_t{1} << slot);
  // The sender sets the flag and then looks for returned slots, so either it sees this slot or this
  // thread sees the flag.
  auto& wants_credit = control_->sender.wants_credit;
  if (wants_credit.load() != 0 && wants_credit.exchange(0) != 0) {
    signal(credit_fd_);
  }
}

void Incoming::lose(const std::string& reason) noexcept {
  {
    const std::lock_guard<std::mutex> lock(reason_mutex_);
    reason_ = reason;
  }
  lost_.store(true, std::memory_order_release);
  if (const auto completions = channel_state_->completions()) {
    completions->bell().ring();
  }
}

void Incoming::tell_loss() noexcept {
  finished_ = true;
  const std::lock_guard<std::mutex> lock(reason_mutex_);
  channel_state_->fail(Failure::Kind::kPeerLost,
                       channel_state_->peer_name() + " is gone: " + reason_);
}

void Incoming::stop() noexcept {
  control_->receiver.closed.store(1, std::memory_order_release);
  signal(credit_fd_);
}

}  // namespace adaptive::shm
