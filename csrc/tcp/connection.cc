#include "tcp/connection.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "common/error.h"
#include "common/link.h"

namespace adaptive::tcp {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint32_t kReadEvents = EPOLLIN | EPOLLRDHUP;
constexpr auto kLongestPeriod = std::chrono::milliseconds(1000);
constexpr int kTicksPerLimit = 4;
// Maximum number of bytes to read per call, so that one peer's data does not delay other peers.
constexpr std::size_t kReadBytes = std::size_t{4} << 20;
// Minimum time between two reads of a socket. Each read is a system call, and the waiting thread
// must also check other sources.
constexpr auto kBetweenLooks = std::chrono::nanoseconds(1000);
// Number of blocks above slot_bytes that are kept for later messages of the same size.
constexpr std::size_t kCachedSlots = 4;
constexpr std::size_t kMinCacheBytes = std::size_t{128} << 20;

// Returns the heartbeat period, which is several times shorter than the time limit of either end.
std::chrono::milliseconds period_of(const Offer& mine, const Offer& theirs) {
  return std::clamp(std::min(mine.silent_limit, theirs.silent_limit) / kTicksPerLimit,
                    std::chrono::milliseconds(1), kLongestPeriod);
}

std::int64_t now_ns() {
  return std::chrono::nanoseconds(Clock::now().time_since_epoch()).count();
}

}  // namespace

Connection::Connection(const Session& session, int peer, ForkSafeFd socket, const Offer& mine,
                       const Offer& theirs)
    : state_(session, peer, "TCP channel with "),
      mine_(mine),
      period_(period_of(mine, theirs)),
      reactor_(session.reactor),
      socket_(std::move(socket)),
      buffers_(static_cast<std::size_t>(mine.slot_bytes),
               std::max(kMinCacheBytes, kCachedSlots * static_cast<std::size_t>(mine.slot_bytes))),
      writer_(socket_.get(), theirs.slots, mine.slots,
              [this](bool want) { watch(EPOLLOUT, want); }),
      decoder_(session.job, mine.limit_bytes, peer) {}

void Connection::start() {
  const auto self = shared_from_this();
  events_ = kReadEvents;
  reactor_->add(
      socket_.get(), events_, [self](std::uint32_t events) { self->on_events(events); },
      [self](const std::exception& error) {
        self->state_.fail(Failure::Kind::kTransport, error.what());
      });
  timer_ = reactor_->every(period_, [self] { self->on_tick(); });
  if (const auto completions = state_.completions()) {
    completions->add(self);
  }
}

void Connection::shut() noexcept {
  if (const auto completions = state_.completions()) {
    completions->remove(this);
  }
  reactor_->remove(socket_.get());
  reactor_->stop(timer_);
  pump();
  writer_.stop();
  over_.store(true);
  const std::lock_guard<std::mutex> reading(read_mutex_);
  // Read the remaining bytes first. If unread bytes were left, closing would reset the connection,
  // and the reset could overtake the last data.
  ::shutdown(socket_.get(), SHUT_WR);
  std::array<char, 4096> ignored;
  while (::recv(socket_.get(), ignored.data(), ignored.size(), MSG_DONTWAIT) > 0) {
  }
  socket_.reset();
  block_.reset();
  reactor_.reset();
}

void Connection::check() const {
  state_.check();
  if (over_.load()) {
    throw Error("the TCP channel with " + state_.peer_name() +
                " is closed: the other end has left");
  }
}

// ---- Who reads and writes

void Connection::watch(std::uint32_t events, bool on) noexcept {
  try {
    const std::lock_guard<std::mutex> lock(events_mutex_);
    const std::uint32_t wanted = on ? events_ | events : events_ & ~events;
    if (wanted != events_) {
      events_ = wanted;
      reactor_->modify(socket_.get(), wanted);
    }
  } catch (const std::exception& error) {
    state_.fail(Failure::Kind::kTransport, error.what());
  }
}

void Connection::on_events(std::uint32_t events) {
  if ((events & EPOLLOUT) != 0) {
    pump();
  }
  if ((events & ~static_cast<std::uint32_t>(EPOLLOUT)) != 0) {
    receive(nullptr, kReadBytes);
  }
  // Stop watching the socket of an ended connection, because the kernel keeps reporting the end.
  if (over_.load()) {
    reactor_->remove(socket_.get());
  }
}

void Connection::on_tick() {
  if (over_.load()) {
    return;
  }
  receive(nullptr, kReadBytes);
  const auto present = Clock::now();
  if (heard_.exchange(false)) {
    silent_ticks_ = 0;
    heard_at_ = present;
  } else {
    ++silent_ticks_;
  }
  writer_.beat();
  pump();
  // Counts ticks instead of measuring time, so that pauses of this process do not count against the
  // peer.
  if (silent_ticks_ * period_ >= mine_.silent_limit && !over_.load() && !goodbye_came_.load()) {
    state_.fail(Failure::Kind::kPeerLost, silence_text(present - heard_at_, mine_.silent_limit));
    end();
    reactor_->remove(socket_.get());
  }
}

// Drops unsent messages. Must be called without a lock, because destroying their owners may run the
// caller's code.
void Connection::end() noexcept {
  over_.store(true);
  writer_.stop();
}

void Connection::pump() noexcept {
  try {
    writer_.pump();
  } catch (const std::exception& error) {
    state_.fail(Failure::Kind::kTransport, error.what());
  }
}

// ---- Receiving

bool Connection::poll(Completions& into) noexcept {
  const std::int64_t present_ns = now_ns();
  if (present_ns < next_look_ns_.load(std::memory_order_relaxed)) {
    return false;
  }
  next_look_ns_.store(present_ns + kBetweenLooks.count(), std::memory_order_relaxed);
  return receive(&into, kReadBytes);
}

// Called on the reactor's thread when another thread is reading the socket. Stops watching the
// socket, because the reactor would otherwise be called again and again while that thread copies.
// The reading thread watches the socket again afterwards. Returns true if that thread has just
// finished.
bool Connection::leave_to_other(std::unique_lock<std::mutex>& reading) noexcept {
  watch(kReadEvents, false);
  left_to_other_.store(true);
  return reading.try_lock();
}

bool Connection::receive(Completions* into, std::size_t budget_bytes) noexcept {
  if (over_.load(std::memory_order_relaxed)) {
    return false;
  }
  bool delivered = false;
  {
    std::unique_lock<std::mutex> reading(read_mutex_, std::try_to_lock);
    if (!reading.owns_lock() && (into != nullptr || !leave_to_other(reading))) {
      return false;
    }
    into_ = into;
    delivered_ = false;
    try {
      read_some(budget_bytes);
    } catch (const std::exception& error) {
      over_.store(true);
      state_.fail(Failure::Kind::kTransport, error.what());
    }
    delivered = delivered_;
  }
  if (left_to_other_.exchange(false)) {
    watch(kReadEvents, true);
  }
  if (over_.load()) {
    end();
    return true;
  }
  if (credits_came_.exchange(false)) {
    pump();
  }
  return delivered;
}

void Connection::read_some(std::size_t budget_bytes) {
  for (std::size_t taken_bytes = 0;
       taken_bytes < budget_bytes && !over_.load(std::memory_order_relaxed);) {
    FrameDecoder::Room room = decoder_.room();
    msghdr message{};
    message.msg_iov = room.parts.data();
    message.msg_iovlen = static_cast<std::size_t>(room.count);
    const ssize_t count = ::recvmsg(socket_.get(), &message, MSG_DONTWAIT);
    if (count > 0) {
      heard_.store(true, std::memory_order_relaxed);
      const auto received_bytes = static_cast<std::size_t>(count);
      taken_bytes += received_bytes;
      decoder_.took(received_bytes, *this);
      if (received_bytes < room.size_bytes) {
        return;  // all data were read; the kernel reports data that arrived meanwhile
      }
    } else if (count == 0) {
      on_end(writer_.broken());
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return;
    } else if (errno != EINTR) {
      on_end(errno);
    }
  }
}

void Connection::on_end(int code) {
  over_.store(true);
  if (goodbye_came_.load()) {
    return;
  }
  state_.fail(Failure::Kind::kPeerLost,
              code == 0
                  ? "its end of the connection was closed without a goodbye: its process ended"
                  : std::string("the connection broke: ") + std::strerror(code));
}

std::byte* Connection::begin(const Message& message) {
  if (!writer_.use_slot()) {
    throw Error("it sent " + describe(message) + " although no slot was free");
  }
  if (message.nbytes == 0) {
    return nullptr;
  }
  block_ = buffers_.take(static_cast<std::size_t>(message.nbytes));
  return block_->data();
}

void Connection::complete(const Message& message) {
  const auto nbytes = static_cast<std::size_t>(message.nbytes);
  std::byte* const data = block_ ? block_->data() : nullptr;
  if (message.has_crc != 0 && crc32c(data, nbytes) != message.crc) {
    throw Error(describe(message) + " was corrupted in transit: the CRC of its payload is " +
                std::to_string(crc32c(data, nbytes)) + " instead of " +
                std::to_string(message.crc));
  }
  Arrival arrival;
  arrival.peer = state_.peer();
  arrival.message = message;
  arrival.payload = Lease(data, nbytes, shared_from_this(), &Connection::release,
                          reinterpret_cast<std::uintptr_t>(block_.release()));
  num_held_.fetch_add(1, std::memory_order_relaxed);
  arrival.slots = mine_.slots;
  arrival.held = &num_held_;
  arrival.arrived_ns = now_ns();
  state_.note_received(message);
  delivered_ = true;
  if (into_ != nullptr) {
    into_->found(std::move(arrival));
  } else if (const auto completions = state_.completions()) {
    completions->put(std::move(arrival));
  }
}

void Connection::credits(std::uint32_t count) {
  writer_.add_credits(count);
  credits_came_.store(true);
}

void Connection::goodbye() {
  goodbye_came_.store(true);
}

void Connection::release(void* owner, std::uint64_t token) noexcept {
  auto* const connection = static_cast<Connection*>(owner);
  if (connection->state_.in_maker()) {
    connection->give_back(reinterpret_cast<Block*>(static_cast<std::uintptr_t>(token)));
  }
}

void Connection::give_back(Block* block) noexcept {
  if (block != nullptr) {
    buffers_.give_back(std::unique_ptr<Block>(block));
  }
  num_held_.fetch_sub(1, std::memory_order_relaxed);
  if (writer_.free_slot()) {
    pump();
  }
}

}  // namespace adaptive::tcp
