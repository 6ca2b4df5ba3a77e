#include "common/loopback.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "common/error.h"
#include "common/fork_guard.h"

namespace adaptive {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr unsigned kMostSlots = 64;

struct Free {
  void operator()(std::byte* memory) const noexcept { std::free(memory); }
};

// Memory of one message. `users` counts the leases on it: the receiver's and, while what was
// reserved is still looked at, the sender's.
struct Block {
  explicit Block(std::size_t size) : size_bytes(std::max(size, kAlignment)) {
    void* raw = nullptr;
    if (::posix_memalign(&raw, kAlignment, size_bytes) != 0) {
      throw Error("there is no memory for " + std::to_string(size_bytes) + " bytes of a channel");
    }
    memory.reset(static_cast<std::byte*>(raw));
  }

  std::size_t size_bytes;
  std::unique_ptr<std::byte, Free> memory;
  unsigned users = 0;
  std::uint64_t reservation = 0;  // 0: none
};

struct Waiting {
  Message message;
  const void* data = nullptr;
  std::shared_ptr<void> owner;
  Block* block = nullptr;  // instead of data: a committed reservation
};

// Shared by the sender and every lease, so that views outlive the channel.
class Pool : public std::enable_shared_from_this<Pool> {
 public:
  Pool(const Session& session, const LoopbackOptions& options)
      : completions_(session.completions), rank_(session.rank), options_(options) {}

  void send(const Message& message, const void* data, const Keeper& keeper) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (waiting_.empty() && has_credit()) {
      deliver(message, filled(message, data));
      return;
    }
    std::shared_ptr<void> owner = keeper.make == nullptr ? nullptr : keeper.make(keeper.context);
    waiting_.push_back({message, data, std::move(owner), nullptr});
  }

  std::optional<Reserved> reserve(std::size_t nbytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto num_reserved = std::count_if(
        blocks_.begin(), blocks_.end(), [](const auto& block) { return block->reservation != 0; });
    if (!has_credit() || nbytes > options_.slot_bytes || num_reserved >= options_.reservable) {
      return std::nullopt;
    }
    Block* const block = take(nbytes);
    block->reservation = ++last_reservation_;
    return Reserved{lease_on(block, nbytes), block->reservation};
  }

  void commit(const Message& message, std::uint64_t reservation) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto place = std::find_if(blocks_.begin(), blocks_.end(), [&](const auto& block) {
      return reservation != 0 && block->reservation == reservation;
    });
    if (place == blocks_.end() || message.nbytes > (*place)->size_bytes) {
      throw Error("the committed memory is no reservation of the channel of rank " +
                  std::to_string(rank_) + " to itself, or was already committed or dropped");
    }
    Block* const block = place->get();
    block->reservation = 0;
    ++block->users;  // until it is delivered
    if (waiting_.empty()) {
      deliver(message, block);
      --block->users;
    } else {
      waiting_.push_back({message, nullptr, nullptr, block});
    }
  }

  bool wait_empty(const Deadline& deadline) {
    std::unique_lock<std::mutex> lock(mutex_);
    return moved_.wait_for(lock, std::chrono::milliseconds(deadline.remaining_ms()),
                           [this] { return waiting_.empty(); });
  }

  std::size_t num_waiting() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return waiting_.size();
  }

 private:
  bool has_credit() const noexcept { return blocks_.size() - free_.size() < options_.slots; }
  void count() noexcept { num_held_.store(static_cast<unsigned>(blocks_.size() - free_.size())); }

  // Messages above slot_bytes have a block of their own size, which is not kept afterwards.
  Block* take(std::size_t nbytes) {
    if (nbytes <= options_.slot_bytes && !free_.empty()) {
      Block* const block = free_.back();
      free_.pop_back();
      count();
      return block;
    }
    free_.reserve(blocks_.size() + 1);
    blocks_.push_back(std::make_unique<Block>(std::max(nbytes, options_.slot_bytes)));
    count();
    return blocks_.back().get();
  }

  Block* filled(const Message& message, const void* data) {
    Block* const block = take(message.nbytes);
    if (message.nbytes != 0) {
      std::memcpy(block->memory.get(), data, message.nbytes);
    }
    return block;
  }

  Lease lease_on(Block* block, std::size_t nbytes) {
    ++block->users;
    return Lease(block->memory.get(), nbytes, shared_from_this(), &Pool::release,
                 reinterpret_cast<std::uintptr_t>(block));
  }

  void deliver(const Message& message, Block* block) {
    const auto completions = completions_.lock();
    if (completions == nullptr) {  // nobody will ever take it
      ++block->users;
      drop(block);
      return;
    }
    Arrival arrival;
    arrival.peer = rank_;
    arrival.message = message;
    arrival.payload = lease_on(block, message.nbytes);
    arrival.slots = options_.slots;
    arrival.held = &num_held_;
    completions->put(std::move(arrival));
  }

  static void release(void* owner, std::uint64_t token) noexcept {
    auto* const pool = static_cast<Pool*>(owner);
    if (pool->guard_.in_maker()) {
      pool->give_back(reinterpret_cast<Block*>(static_cast<std::uintptr_t>(token)));
    }
  }

  void give_back(Block* block) noexcept {
    std::vector<Waiting> sent;  // owners are let go without the mutex
    const std::lock_guard<std::mutex> lock(mutex_);
    drop(block);
    try {
      while (!waiting_.empty() && (waiting_.front().block != nullptr || has_credit())) {
        Waiting& next = waiting_.front();
        const bool reserved = next.block != nullptr;
        deliver(next.message, reserved ? next.block : filled(next.message, next.data));
        if (reserved) {
          --next.block->users;
        }
        sent.push_back(std::move(next));
        waiting_.pop_front();
      }
    } catch (const std::exception& error) {
      fail(error.what());
    }
    moved_.notify_all();
  }

  void drop(Block* block) noexcept {
    if (--block->users != 0) {
      return;
    }
    block->reservation = 0;
    if (block->size_bytes <= std::max(options_.slot_bytes, kAlignment)) {
      free_.push_back(block);  // has room: see take()
    } else {
      blocks_.erase(std::find_if(blocks_.begin(), blocks_.end(),
                                 [&](const auto& entry) { return entry.get() == block; }));
    }
    count();
  }

  void fail(const char* reason) noexcept {
    const auto completions = completions_.lock();
    if (failed_ || completions == nullptr) {
      return;
    }
    failed_ = true;
    completions->put(Failure{Failure::Kind::kTransport, rank_, reason});
  }

  std::weak_ptr<Completions> completions_;  // its items hold leases, which hold this
  const int rank_;
  const LoopbackOptions options_;
  const ForkGuard guard_;
  mutable std::mutex mutex_;
  std::condition_variable moved_;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<Block*> free_;
  std::atomic<unsigned> num_held_{0};
  std::deque<Waiting> waiting_;
  std::uint64_t last_reservation_ = 0;
  bool failed_ = false;
};

class LoopbackSender final : public Sender {
 public:
  LoopbackSender(const Session& session, const LoopbackOptions& options)
      : session_(session), options_(options), pool_(std::make_shared<Pool>(session, options)) {}

  void send(Message message, const void* data, const Keeper& keeper) override {
    prepare(message);
    pool_->send(message, data, keeper);
    ++sequence_;
  }

  std::optional<Reserved> reserve(std::size_t nbytes) override { return pool_->reserve(nbytes); }

  void commit(Message message, Reserved reserved) override {
    prepare(message);
    pool_->commit(message, reserved.token);
    ++sequence_;
  }

  bool flush(const Deadline& deadline) override { return pool_->wait_empty(deadline); }
  std::size_t pending() const noexcept override { return pool_->num_waiting(); }
  void close() noexcept override { closed_ = true; }

  Info info() const override {
    return {{"kind", std::string("loopback")},
            {"slot_bytes", static_cast<std::int64_t>(options_.slot_bytes)},
            {"slots", static_cast<std::int64_t>(options_.slots)}};
  }

 private:
  void prepare(Message& message) const {
    if (closed_) {
      throw Error("the channel of rank " + std::to_string(session_.rank) + " to itself is closed");
    }
    if (message.nbytes > options_.limit_bytes) {
      throw Error(describe(message) + " has " + std::to_string(message.nbytes) +
                  " bytes, more than the limit of " + std::to_string(options_.limit_bytes));
    }
    message.magic = kMessageMagic;
    message.version = kMessageVersion;
    message.job = session_.job;
    message.sequence = sequence_;
    message.offset = 0;
    message.piece_bytes = message.nbytes;
    check_message(message, session_.job, message.nbytes, session_.rank);
  }

  const Session session_;
  const LoopbackOptions options_;
  std::shared_ptr<Pool> pool_;
  std::uint64_t sequence_ = 0;
  bool closed_ = false;
};

}  // namespace

std::unique_ptr<Sender> open_loopback(const Session& session, const LoopbackOptions& options) {
  if (options.slots < 1 || options.slots > kMostSlots || options.slot_bytes < 1) {
    throw std::invalid_argument("slots " + std::to_string(options.slots) + " of " +
                                std::to_string(options.slot_bytes) +
                                " bytes must be 1 to 64 slots of at least 1 byte");
  }
  return std::make_unique<LoopbackSender>(session, options);
}

}  // namespace adaptive
