// The queue on which a process waits for its peers. It contains the arrivals and failures of all
// channels and items from other threads, in the order in which they were found.
//
//   shm rings ─┐ poll()                       reactor thread ─┐ put()
//   RDMA CQs  ─┼──────> Completions.wait() <──────────────────┼── tcp, liveness
//              │   spin, then sleep on the bell               └── other threads (gloo,
//                                                                    NCCL, notices)
//
// The waiting thread polls the sources itself, so that a peer's store reaches it without the help
// of another thread. A source that is notified of arrivals by the kernel (RDMA) registers a
// descriptor with the reactor, which then rings the bell.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "common/deadline.h"
#include "common/futex.h"
#include "common/mapped_region.h"
#include "common/message.h"
#include "common/scoped_fd.h"

namespace adaptive {

// The right to read a received payload. Any thread may destroy the lease, which returns the slot.
class Lease {
 public:
  // Called with the arguments of the lease's constructor. Must not throw.
  using Release = void (*)(void* owner, std::uint64_t token) noexcept;

  Lease() noexcept = default;
  // `owner` is kept alive by the lease, so that a view of a slot keeps its channel alive.
  Lease(std::byte* data, std::size_t size_bytes, std::shared_ptr<void> owner, Release release,
        std::uint64_t token) noexcept
      : data_(data),
        size_bytes_(size_bytes),
        owner_(std::move(owner)),
        release_(release),
        token_(token) {}
  Lease(Lease&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        size_bytes_(std::exchange(other.size_bytes_, 0)),
        owner_(std::move(other.owner_)),
        release_(std::exchange(other.release_, nullptr)),
        token_(other.token_) {}
  Lease& operator=(Lease&& other) noexcept {
    if (this != &other) {
      give_back();
      data_ = std::exchange(other.data_, nullptr);
      size_bytes_ = std::exchange(other.size_bytes_, 0);
      owner_ = std::move(other.owner_);
      release_ = std::exchange(other.release_, nullptr);
      token_ = other.token_;
    }
    return *this;
  }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  ~Lease() { give_back(); }

  std::byte* data() const noexcept { return data_; }
  std::size_t size_bytes() const noexcept { return size_bytes_; }

 private:
  void give_back() noexcept {
    if (release_ != nullptr) {
      std::exchange(release_, nullptr)(owner_.get(), token_);
    }
    owner_.reset();
  }

  std::byte* data_ = nullptr;
  std::size_t size_bytes_ = 0;
  std::shared_ptr<void> owner_;
  Release release_ = nullptr;
  std::uint64_t token_ = 0;
};

// A payload in GPU memory, which streams read. All methods may be called from any thread.
class DevicePayload {
 public:
  virtual ~DevicePayload() = default;

  // Makes the payload readable for all work that is queued on `stream` (a CUstream of the device's
  // primary context) after this call. The lease may be returned as soon as this work is queued,
  // even if it has not finished. Does not wait. Throws Error.
  virtual void enter(unsigned slot, void* stream) = 0;
};

// A complete message that has arrived. Its payload may be read and written.
struct Arrival {
  int peer = -1;
  Message message;
  Lease payload;

  // Number of slots of the channel, and how many of them this process holds. If it holds nearly all
  // slots, the receiver should copy the payload. `held` is valid as long as `payload`, and null if
  // the number of slots does not limit the channel.
  unsigned slots = 0;
  const std::atomic<unsigned>* held = nullptr;

  // Time on the monotonic clock at which the last byte was received. 0 if no thread observes the
  // arrival, for example if the peer writes directly into this process's memory.
  std::int64_t arrived_ns = 0;

  // Null if the payload is in host memory. If it is in GPU memory, device->enter(slot, stream) must
  // be called before a stream reads it. Valid as long as `payload`.
  DevicePayload* device = nullptr;
  unsigned slot = 0;
};

// Reports that a channel ended without being closed properly. Reported once per peer.
struct Failure {
  enum class Kind { kPeerLost, kTransport };
  Kind kind = Kind::kTransport;
  int peer = -1;
  std::string text;  // one line: what happened, to whom, what usually causes it
};

// An item that a caller added with put(), in the caller's own encoding.
struct Posted {
  std::uint64_t item = 0;
};

using Item = std::variant<Arrival, Failure, Posted>;

// A futex word with which peers on this node wake this process. The word is in a one-page anonymous
// file, which this process and its peers map.
class Bell {
 public:
  Bell();  // creates a new bell. Throws SystemError.
  // Maps the bell of a peer. Throws Error if the descriptor is not a bell.
  static Bell attach(ScopedFd fd);

  Bell(Bell&&) noexcept = default;
  Bell& operator=(Bell&&) noexcept = default;

  int fd() const noexcept { return fd_.get(); }

  // Must be called after a change that the owner may be waiting for has become visible. If the
  // owner is awake, this costs only a fence and a load of a cache line that is not written. Returns
  // whether the owner sleeps; a sleeping owner then checks its condition at least once more.
  bool ring() noexcept;

  // To wait, the owner calls announce_sleep(), checks its condition once more, and then sleeps
  // until the bell rings, the deadline passes, or a spurious wake-up occurs.
  std::uint32_t announce_sleep() noexcept;
  void sleep(std::uint32_t announced, const Deadline& deadline);
  void end_sleep() noexcept;

 private:
  struct Words;
  Bell(ScopedFd fd, MappedRegion region);

  ScopedFd fd_;
  MappedRegion region_;
  Words* words_;
};

class Completions;

// A source of arrivals without its own thread. Completions never calls it from two threads at a
// time.
class Source {
 public:
  virtual ~Source() = default;

  // Adds arrivals to `into` with Completions::found(), and returns whether there were any. Never
  // blocks and never throws; a broken peer is reported as a Failure. If nothing arrived, this costs
  // one load of a cache line that only the peer writes.
  virtual bool poll(Completions& into) noexcept = 0;

  // Called before the waiter sleeps; one more poll() follows. After this call, arrivals must ring
  // the bell. The default does nothing, for sources whose peer always rings the bell.
  virtual void arm() noexcept {}
};

// All methods may be called from any thread; one thread at a time waits or polls.
class Completions {
 public:
  // `local_processes` is the number of busy processes that share this node's CPUs. It determines
  // how long wait() spins.
  explicit Completions(unsigned local_processes) : spin_(local_processes) {}
  Completions(const Completions&) = delete;
  Completions& operator=(const Completions&) = delete;

  // Returns the oldest item, or an empty value if there is none.
  std::optional<Item> poll();

  // Waits for an item and returns the oldest. Returns an empty value if the deadline passed or if
  // no item came for about `longest`, which is for callers that do other work periodically. The
  // clock is read only after some unsuccessful spinning.
  std::optional<Item> wait(const Deadline& deadline,
                           std::chrono::nanoseconds longest = std::chrono::nanoseconds::max());

  // Adds an item and wakes the waiter.
  void put(Item item);

  // Adds an item without waking the waiter. Only Source::poll() may call this, because the caller
  // of poll() checks the queue afterwards.
  void found(Item item);

  // Processes arrivals on a thread other than the waiter's, for example pieces of large messages
  // while the process computes. When it returns, everything that arrived before the call has been
  // processed.
  void drain_sources();

  void add(std::shared_ptr<Source> source);
  // After this returns, the source is not called any more.
  void remove(const Source* source) noexcept;

  Bell& bell() noexcept { return bell_; }

 private:
  bool poll_sources() noexcept;
  bool look() noexcept;
  void sleep(const Deadline& deadline);
  std::optional<Item> pop();

  Bell bell_;
  SpinBudget spin_;
  std::mutex sources_mutex_;  // held while sources are polled; taken before items_mutex_
  std::vector<std::shared_ptr<Source>> sources_;
  std::mutex items_mutex_;
  std::deque<Item> items_;
  std::atomic<std::size_t> num_items_{0};
};

}  // namespace adaptive
