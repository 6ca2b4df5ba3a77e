#include "shm/outgoing.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "common/copy.h"
#include "common/error.h"

namespace adaptive::shm {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kWorthWaitingBytes = std::size_t{64} << 10;
constexpr std::chrono::nanoseconds kLongestPatience = std::chrono::microseconds(20);
// Interval at which a wait for a credit checks `given_up`.
constexpr std::chrono::milliseconds kLookUp(20);

std::uint64_t bit(unsigned slot) noexcept {
  return std::uint64_t{1} << slot;
}

std::uint64_t mask_of(unsigned slots) noexcept {
  return slots >= 64 ? ~std::uint64_t{0} : bit(slots) - 1;
}

unsigned count_of(std::uint64_t slots) noexcept {
  return static_cast<unsigned>(__builtin_popcountll(slots));
}

}  // namespace

// ---- OutgoingMemory

OutgoingMemory::OutgoingMemory(const ShmOptions& options, const std::string& purpose,
                               const Deadline& deadline, const Tick& tick)
    : num_entries(entries_for(options.slots)),
      slot_stride(round_up(options.slot_bytes, kPage)),
      control_segment(
          make_segment(control_bytes(num_entries), purpose, deadline, tick, options.turn_name)),
      data_segment(
          make_segment(options.slots * slot_stride, purpose, deadline, tick, options.turn_name)),
      credit_fd(make_eventfd()) {
  // New memory is filled with zeros, which is the initial value of all other fields.
  new (control_segment.region.data()) Control{};
  control()->sender.magic = kControlMagic;
  control()->sender.version = kControlVersion;
}

void OutgoingMemory::drop_view(void* owner, std::uint64_t slot) noexcept {
  auto* const memory = static_cast<OutgoingMemory*>(owner);
  if (!memory->guard.in_maker()) {
    return;
  }
  memory->gone.fetch_or(bit(static_cast<unsigned>(slot)));
  auto& wants_credit = memory->control()->sender.wants_credit;
  if (wants_credit.load() != 0 && wants_credit.exchange(0) != 0) {
    signal(memory->credit_fd);
  }
}

// ---- Outgoing

Outgoing::Outgoing(const Session& session, std::shared_ptr<ChannelState> channel_state,
                   const ShmOptions& options, std::shared_ptr<OutgoingMemory> memory)
    : channel_state_(std::move(channel_state)),
      options_(options),
      memory_(std::move(memory)),
      control_(memory_->control()),
      entries_(memory_->entries()),
      all_slots_(mask_of(options.slots)),
      crowded_(session.local_processes > allowed_cpus()),
      free_(all_slots_),
      spin_(session.local_processes) {}

void Outgoing::connect(Bell bell, ScopedFd wake_fd, std::size_t stream_from_bytes,
                       std::function<void()> on_end) {
  const std::lock_guard<std::mutex> lock(mutex_);
  bell_.emplace(std::move(bell));
  wake_fd_ = std::move(wake_fd);
  stream_from_bytes_ = stream_from_bytes;
  on_end_ = std::move(on_end);
}

bool Outgoing::receiver_closed() const noexcept {
  return control_->receiver.closed.load(std::memory_order_acquire) != 0;
}

// Fills in the fields that the channel sets. Throws Error if the receiver would reject the message.
void Outgoing::prepare(Message& message) const {
  channel_state_->check();
  if (closed_ || receiver_closed()) {
    throw Error(describe(message) + " cannot be sent to " + channel_state_->peer_name() + ": " +
                (closed_ ? "this end of the channel is closed" : "it has closed its end"));
  }
  channel_state_->prepare(message, sequence_, options_.limit_bytes, options_.crc);
}

// Marks returned slots as free. Bits of slots that the receiver does not have are ignored.
void Outgoing::gather() noexcept {
  auto& returned = control_->returns.returned;
  if (returned.load() != 0) {
    out_ &= ~returned.exchange(0);
  }
  if (memory_->gone.load() != 0) {
    const std::uint64_t gone = memory_->gone.exchange(0);
    viewed_ &= ~gone;
    reserved_ &= ~gone;
  }
  free_ = all_slots_ & ~(out_ | viewed_ | reserved_ | queued_);
}

unsigned Outgoing::take_slot() noexcept {
  if (free_ == 0) {
    gather();
  }
  if (free_ == 0) {
    return kNoSlot;
  }
  const auto slot = static_cast<unsigned>(__builtin_ctzll(free_));
  free_ &= ~bit(slot);
  return slot;
}

void Outgoing::publish(const Message& message, unsigned slot, std::uint32_t flags) noexcept {
  Entry& entry = entries_[published_ & (memory_->num_entries - 1)];
  const auto* bytes = reinterpret_cast<const unsigned char*>(&message);
  entry.slot = slot;
  entry.flags = flags;
  std::memcpy(entry.front, bytes, kFrontBytes);
  if (message.dimensions > kFrontDimensions) {
    std::memcpy(entry.back, bytes + kFrontBytes, sizeof(entry.back));
  }
  if (slot != kNoSlot) {
    out_ |= bit(slot);
  }
  entry.number.store(++published_, std::memory_order_release);
  bell_->ring();
}

void Outgoing::copy_in(unsigned slot, const std::byte* from,
                       std::size_t size_bytes) const noexcept {
  if (size_bytes >= stream_from_bytes_) {
    copy_streaming(memory_->slot(slot), from, size_bytes);
  } else if (size_bytes != 0) {
    std::memcpy(memory_->slot(slot), from, size_bytes);
  }
}

// Waits for a slot, but at most for an eighth of the time that the copy takes. Without the wait,
// another thread would have to send the message, which costs more. Does not wait if processes share
// processors, because the receiver may be able to run only while this process does not.
unsigned Outgoing::take_slot_soon(std::size_t size_bytes) noexcept {
  unsigned slot = take_slot();
  if (slot != kNoSlot || size_bytes < kWorthWaitingBytes || crowded_) {
    return slot;
  }
  const auto patience = std::min(std::chrono::nanoseconds(size_bytes / 128), kLongestPatience);
  const auto end = Deadline::Clock::now() + patience;
  do {
    relax_cpu();
    slot = take_slot();
  } while (slot == kNoSlot && Deadline::Clock::now() < end);
  return slot;
}

// Publishes as much of a message as the free slots can hold. Returns whether the whole message is
// published.
bool Outgoing::move_on(Pending& pending) noexcept {
  Message& message = pending.message;
  if (pending.slot != kNoSlot) {
    queued_ &= ~bit(pending.slot);
    publish(message, pending.slot, kComputedInPlace);
    return true;
  }
  do {
    const std::size_t count =
        std::min<std::uint64_t>(message.nbytes - pending.offset, options_.slot_bytes);
    const unsigned slot = take_slot_soon(count);
    if (slot == kNoSlot) {
      return false;
    }
    copy_in(slot, pending.data + pending.offset, count);
    message.offset = pending.offset;
    message.piece_bytes = count;
    if (options_.crc) {
      message.crc = crc32c(pending.data + pending.offset, count);
    }
    publish(message, slot, 0);
    pending.offset += count;
  } while (pending.offset < message.nbytes);
  return true;
}

// Requests a signal when a slot is returned. Returns true if a slot is already free. If the message
// has several pieces, also wakes the receiver's reactor: the pieces occupy slots while the receiver
// computes, and its reactor can assemble them.
bool Outgoing::ask_for_credit(const Pending& first) noexcept {
  control_->sender.wants_credit.store(1);
  gather();
  if (free_ != 0) {
    return true;
  }
  if (first.message.nbytes > options_.slot_bytes) {
    signal(wake_fd_);
  }
  return false;
}

void Outgoing::drop_backlog(Owners& done) noexcept {
  for (Pending& pending : backlog_) {
    if (pending.slot != kNoSlot) {
      queued_ &= ~bit(pending.slot);
    }
    try {
      done.push_back(std::move(pending.owner));
    } catch (...) {
      // If there is no memory for the list entry, the owner is destroyed under the mutex.
    }
  }
  backlog_.clear();
  num_pending_.store(0, std::memory_order_relaxed);
  moved_.notify_all();
}

void Outgoing::publish_end() noexcept {
  if (end_published_ || channel_state_->broken()) {
    return;
  }
  end_published_ = true;
  Message message;
  message.kind = MessageKind::kEnd;
  message.job = channel_state_->job();
  message.sequence = sequence_;
  message.dimensions = 1;
  publish(message, kNoSlot, 0);
  if (on_end_) {
    on_end_();
  }
}

void Outgoing::advance(Owners& done) {
  if (channel_state_->broken()) {
    drop_backlog(done);
    return;
  }
  if (receiver_closed() && !backlog_.empty()) {
    const std::size_t count = backlog_.size();
    drop_backlog(done);
    channel_state_->fail(Failure::Kind::kTransport,
                         channel_state_->peer_name() + " closed its end of the channel while " +
                             std::to_string(count) + " messages to it were waiting for room");
    return;
  }
  while (!backlog_.empty()) {
    Pending& first = backlog_.front();
    done.reserve(done.size() + 1);  // before the message is published
    if (move_on(first)) {
      done.push_back(std::move(first.owner));
      backlog_.pop_front();
      num_pending_.store(backlog_.size(), std::memory_order_relaxed);
    } else if (!ask_for_credit(first)) {
      return;
    }
  }
  control_->sender.wants_credit.store(0, std::memory_order_relaxed);
  moved_.notify_all();
  if (closed_) {
    publish_end();
  }
}

void Outgoing::queue(Pending&& pending) {
  backlog_.push_back(std::move(pending));
  num_pending_.store(backlog_.size(), std::memory_order_relaxed);
}

void Outgoing::send(Message& message, const void* data, const Keeper& keeper) {
  Owners done;
  const std::lock_guard<std::mutex> lock(mutex_);
  prepare(message);
  if (!backlog_.empty()) {
    advance(done);
  }
  Pending pending;
  pending.message = message;
  pending.data = static_cast<const std::byte*>(data);
  if (backlog_.empty() && move_on(pending)) {
    ++sequence_;
    return;
  }
  try {
    if (keeper.make != nullptr) {
      pending.owner = keeper.make(keeper.context);
    }
    queue(std::move(pending));
  } catch (...) {
    if (pending.offset != 0) {
      channel_state_->fail(
          Failure::Kind::kTransport,
          "a message to " + channel_state_->peer_name() + " could only be sent in part: no memory");
    }
    throw;
  }
  ++sequence_;
  advance(done);  // requests credits
}

std::optional<Reserved> Outgoing::reserve(std::size_t nbytes) {
  if (nbytes > options_.slot_bytes) {
    return std::nullopt;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  channel_state_->check();
  gather();
  if (count_of(viewed_ | reserved_ | queued_) >= options_.reservable) {
    return std::nullopt;
  }
  const unsigned slot = take_slot();
  if (slot == kNoSlot) {
    return std::nullopt;
  }
  reserved_ |= bit(slot);
  viewed_ |= bit(slot);
  reservations_[slot] = ++last_reservation_ * kMostSlots + slot;
  return Reserved{Lease(memory_->slot(slot), nbytes, memory_, &OutgoingMemory::drop_view, slot),
                  reservations_[slot]};
}

void Outgoing::commit(Message& message, std::uint64_t token) {
  Owners done;
  const std::lock_guard<std::mutex> lock(mutex_);
  prepare(message);
  gather();  // the caller may already have dropped the memory
  const auto slot = static_cast<unsigned>(token % kMostSlots);
  if (slot >= options_.slots || (reserved_ & bit(slot)) == 0 || reservations_[slot] != token) {
    throw Error("the committed memory was not reserved from the channel to " +
                channel_state_->peer_name() + ", or was committed or dropped before");
  }
  if (message.nbytes > options_.slot_bytes) {
    throw Error(describe(message) + " does not fit into the memory that was reserved for it");
  }
  if (options_.crc) {
    message.crc = crc32c(memory_->slot(slot), message.nbytes);
  }
  if (!backlog_.empty()) {
    advance(done);
  }
  Pending pending;
  pending.message = message;
  pending.slot = slot;
  if (backlog_.empty()) {
    move_on(pending);
  } else {
    queue(std::move(pending));
    queued_ |= bit(slot);
  }
  reserved_ &= ~bit(slot);
  ++sequence_;
}

void Outgoing::admit(Message message) {
  const std::lock_guard<std::mutex> lock(mutex_);
  prepare(message);
}

unsigned Outgoing::await_slot(const Message& message, const std::function<bool()>& given_up) {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    if (given_up()) {
      return kNoSlot;
    }
    Message probe = message;
    prepare(probe);  // throws if the peer has closed its end
    if (backlog_.empty()) {
      unsigned slot = take_slot();
      if (slot == kNoSlot) {
        control_->sender.wants_credit.store(1);
        slot = take_slot();
      }
      if (slot != kNoSlot) {
        reserved_ |= bit(slot);
        reservations_[slot] = ++last_reservation_ * kMostSlots + slot;
        return slot;
      }
    }
    moved_.wait_for(lock, kLookUp);
  }
}

void Outgoing::publish_on_device(Message& message, unsigned slot) {
  const std::lock_guard<std::mutex> lock(mutex_);
  prepare(message);
  message.has_crc = 0;  // the host cannot read the payload
  publish(message, slot, kOnDevice);
  reserved_ &= ~bit(slot);
  ++sequence_;
}

bool Outgoing::flush(const Deadline& deadline) {
  for (;;) {
    Owners done;
    std::unique_lock<std::mutex> lock(mutex_);
    if (backlog_.empty()) {
      channel_state_->check();
      return true;
    }
    advance(done);
    if (backlog_.empty()) {
      channel_state_->check();
      return true;
    }
    lock.unlock();
    if (deadline.expired()) {
      return false;
    }
    const bool room = spin_.spin_until([this] {
      return control_->returns.returned.load(std::memory_order_relaxed) != 0 ||
             memory_->gone.load(std::memory_order_relaxed) != 0 || channel_state_->broken();
    });
    if (!room) {
      lock.lock();
      moved_.wait_for(lock, std::chrono::milliseconds(deadline.remaining_ms()),
                      [this] { return backlog_.empty(); });
    }
  }
}

void Outgoing::close() noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
  if (backlog_.empty()) {
    publish_end();
  }
}

void Outgoing::on_credit() noexcept {
  clear(memory_->credit_fd);
  Owners done;
  const std::lock_guard<std::mutex> lock(mutex_);
  try {
    advance(done);
  } catch (const std::exception& error) {
    channel_state_->fail(Failure::Kind::kTransport,
                         "sending to " + channel_state_->peer_name() + " failed: " + error.what());
  }
}

void Outgoing::abandon() noexcept {
  Owners done;
  const std::lock_guard<std::mutex> lock(mutex_);
  drop_backlog(done);
}

}  // namespace adaptive::shm
