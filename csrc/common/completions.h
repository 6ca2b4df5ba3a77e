// The one place where a process waits for what its peers send: arrivals and failures of all
// channels, and items that other threads put, in the order in which they were found.
//
//   shm rings ─┐ poll()                       reactor thread ─┐ put()
//   RDMA CQs  ─┼──────> Completions.wait() <──────────────────┼── tcp, liveness
//              │   spin, then sleep on the bell               └── other threads (gloo, NCCL,
//              notices)
//
// The thread that waits looks into the sources itself: between a peer's store and the waiter there
// is no other thread. A source that needs the kernel to be told of an arrival (RDMA) has a
// descriptor in the reactor, which rings the bell.
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

// The right to read a received payload, given back once, from any thread, when this is destroyed.
class Lease {
 public:
  // Called with what the lease was made with. Must not throw.
  using Release = void (*)(void* owner, std::uint64_t token) noexcept;

  Lease() noexcept = default;
  // `owner` lives at least as long as the lease: that is how a view of a slot keeps its channel.
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

// A payload in the memory of a GPU, which streams read. Any thread.
class DevicePayload {
 public:
  virtual ~DevicePayload() = default;

  // Lets what is put on `stream` (a CUstream of the device's primary context) from now on read the
  // payload, until its lease is given back: later than all that reads it is on that stream, not
  // when it is done. Does not wait. Throws Error.
  virtual void enter(unsigned slot, void* stream) = 0;
};

// A whole message that has arrived. The payload may be written to as well as read.
struct Arrival {
  int peer = -1;
  Message message;
  Lease payload;

  // How many slots its channel has, and how many of them this process holds: where nearly all are
  // held, a receiver does well to copy. `held` lives as long as `payload`; null where slots are not
  // what bounds the channel.
  unsigned slots = 0;
  const std::atomic<unsigned>* held = nullptr;

  // When its last byte was received, on the monotonic clock; 0 where no thread sees that happen,
  // as in memory that the peer writes by itself.
  std::int64_t arrived_ns = 0;

  // To be asked for `slot` before the payload is read, where it is in a GPU's memory; null where it
  // is in the host's. Lives as long as `payload`.
  DevicePayload* device = nullptr;
  unsigned slot = 0;
};

// The end of a channel that did not close in order. Said once per peer.
struct Failure {
  enum class Kind { kPeerLost, kTransport };
  Kind kind = Kind::kTransport;
  int peer = -1;
  std::string text;  // one line: what happened, to whom, what usually causes it
};

// Something that a caller put and will understand again.
struct Posted {
  std::uint64_t item = 0;
};

using Item = std::variant<Arrival, Failure, Posted>;

// A word that a peer on this node can ring: an anonymous file of one page, mapped by this process
// and by all that send to it.
class Bell {
 public:
  Bell();  // makes one. Throws SystemError.
  // Maps the bell of a peer. Throws Error where the descriptor holds something else.
  static Bell attach(ScopedFd fd);

  Bell(Bell&&) noexcept = default;
  Bell& operator=(Bell&&) noexcept = default;

  int fd() const noexcept { return fd_.get(); }

  // To be called after anything that the owner of the bell may be waiting for became visible.
  // Costs a fence and a load of a line that nobody writes, unless the owner sleeps. Whether it
  // does: then it looks at what it waits for once more at least.
  bool ring() noexcept;

  // The owner's side: announces sleep, then the caller looks once more at what it waits for, then
  // sleeps until rung (or a spurious wake-up or the deadline).
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

// Where arrivals come from without a thread of its own. Completions never calls it from two threads
// at a time.
class Source {
 public:
  virtual ~Source() = default;

  // Moves what has arrived into `into` by Completions::found(); returns whether there was anything.
  // Never blocks and never throws: a broken peer becomes a Failure. Costs one load of a line that
  // only the peer writes when there is nothing.
  virtual bool poll(Completions& into) noexcept = 0;

  // Called before the waiter sleeps and followed by one more poll(): from now on an arrival has to
  // ring the bell. Nothing to do where the peer rings it anyhow.
  virtual void arm() noexcept {}
};

// All methods may be called from any thread; one thread at a time waits or polls.
class Completions {
 public:
  // local_processes: busy processes that share this node's CPUs; decides how long wait() spins.
  explicit Completions(unsigned local_processes) : spin_(local_processes) {}
  Completions(const Completions&) = delete;
  Completions& operator=(const Completions&) = delete;

  // The oldest item, if there is one now.
  std::optional<Item> poll();

  // The oldest item; waits for one. Empty when the deadline passed, and when nothing came for about
  // `longest`, if that is given: for callers that look up now and then.
  // The clock is not asked before a while of spinning was in vain.
  std::optional<Item> wait(const Deadline& deadline,
                           std::chrono::nanoseconds longest = std::chrono::nanoseconds::max());

  // Adds an item and wakes the waiter.
  void put(Item item);

  // Adds an item; only for Source::poll(), whose caller looks at the queue next.
  void found(Item item);

  // Lets somebody other than the waiter move arrivals on (pieces of large messages while the
  // process computes). Everything that was there before the call is found when it returns.
  void drain_sources();

  void add(std::shared_ptr<Source> source);
  // After the return the source is not called any more.
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
