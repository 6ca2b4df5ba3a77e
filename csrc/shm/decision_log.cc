#include "shm/decision_log.h"

#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "common/error.h"
#include "common/futex.h"

namespace adaptive {
namespace detail {

constexpr std::size_t kLineBytes = 64;

// Each struct below fills one cache line, so that the two sides share only the lines that they both
// need.
struct alignas(kLineBytes) HeaderLine {
  std::uint64_t magic;
  std::uint32_t version;
  std::uint32_t num_readers;
  std::uint32_t capacity;
  std::uint32_t reserved;
  std::uint64_t size_bytes;
};

struct alignas(kLineBytes) WriterLine {
  std::atomic<std::uint64_t> published;
  std::atomic<std::uint32_t> futex;  // changes with every entry and every change of state
};

struct alignas(kLineBytes) StateLine {
  std::atomic<std::uint64_t> state;
};

struct alignas(kLineBytes) WaitLine {
  std::atomic<std::uint32_t> sleeping_readers;
  std::atomic<std::uint32_t> writer_sleeps;
  // changes if a reader acknowledges while the writer sleeps
  std::atomic<std::uint32_t> release_futex;
};

struct alignas(kLineBytes) ReaderLine {
  std::atomic<std::uint64_t> acknowledged;
  std::atomic<std::uint32_t> taken_by;  // process id, 0 if free
};

struct Lines {
  HeaderLine header;
  WriterLine writer;
  StateLine state;
  WaitLine waits;
  // num_readers ReaderLines follow, then the entries.
};

}  // namespace detail

namespace {

using detail::Lines;
using detail::ReaderLine;

static_assert(std::atomic<std::uint64_t>::is_always_lock_free &&
                  std::atomic<std::int64_t>::is_always_lock_free,
              "atomics that hide a lock cannot be shared between processes");

constexpr std::uint64_t kMagic = 0x4d41'4445'4349'4445ULL;
constexpr std::uint32_t kVersion = 1;

// Values of StateLine::state. The low half of an aborted state contains the reason.
constexpr std::uint64_t kOpen = 0;
constexpr std::uint64_t kClosed = 1ULL << 32;
constexpr std::uint64_t kAborted = 2ULL << 32;

bool is_aborted(std::uint64_t state) noexcept {
  return state >= kAborted;
}

std::size_t entries_offset(std::uint32_t num_readers) noexcept {
  return sizeof(Lines) + std::size_t{num_readers} * sizeof(ReaderLine);
}

std::size_t size_for(std::uint32_t num_readers, std::uint32_t capacity) noexcept {
  return entries_offset(num_readers) + std::size_t{capacity} * sizeof(std::int64_t);
}

std::string sizes_text(std::uint32_t num_readers, std::uint32_t capacity) {
  return "num_readers " + std::to_string(num_readers) + " and capacity " + std::to_string(capacity);
}

bool sizes_allowed(std::uint32_t num_readers, std::uint32_t capacity) noexcept {
  return num_readers >= 1 && num_readers <= DecisionLog::kMaxReaders && capacity >= 1 &&
         capacity <= DecisionLog::kMaxCapacity;
}

constexpr const char* kForeign = "the descriptor does not hold a decision log of this version";

[[noreturn]] void throw_foreign(const std::string& finding) {
  throw Error(std::string(kForeign) + ": " + finding);
}

SpinBudget spin_for(std::uint32_t num_readers, unsigned local_processes) noexcept {
  return SpinBudget(local_processes == 0 ? num_readers + 1 : local_processes);
}

}  // namespace

// ---- DecisionLog

DecisionLog::DecisionLog(MappedRegion region, std::uint32_t num_readers, std::uint32_t capacity,
                         SpinBudget spin)
    : region_(std::move(region)),
      lines_(reinterpret_cast<Lines*>(region_.data())),
      readers_(reinterpret_cast<ReaderLine*>(region_.data() + sizeof(Lines))),
      entries_(reinterpret_cast<std::atomic<std::int64_t>*>(region_.data() +
                                                            entries_offset(num_readers))),
      num_readers_(num_readers),
      capacity_(capacity),
      spin_(spin),
      owner_(::getpid()) {}

DecisionLog DecisionLog::attach(int fd, unsigned local_processes) {
  const std::size_t size_bytes = sealed_size(fd, kForeign);
  if (size_bytes < size_for(1, 1) || size_bytes > size_for(kMaxReaders, kMaxCapacity)) {
    throw_foreign("its size is " + std::to_string(size_bytes) + " bytes");
  }
  MappedRegion region = MappedRegion::shared(fd, size_bytes);
  // The header is copied once, and the copy is both checked and used, because a peer may write the
  // original at any time. The fence prevents the compiler from reading the original again.
  detail::HeaderLine header;
  std::memcpy(&header, region.data(), sizeof(header));
  std::atomic_signal_fence(std::memory_order_seq_cst);
  if (header.magic != kMagic) {
    throw_foreign("it starts with other bytes");
  }
  if (header.version != kVersion) {
    throw_foreign("its version is " + std::to_string(header.version) + ", not " +
                  std::to_string(kVersion));
  }
  if (!sizes_allowed(header.num_readers, header.capacity) || header.size_bytes != size_bytes ||
      size_for(header.num_readers, header.capacity) != size_bytes) {
    throw_foreign(sizes_text(header.num_readers, header.capacity) + " do not fit its " +
                  std::to_string(size_bytes) + " bytes");
  }
  return DecisionLog(std::move(region), header.num_readers, header.capacity,
                     spin_for(header.num_readers, local_processes));
}

void DecisionLog::set_state(std::uint64_t state) noexcept {
  std::uint64_t current = lines_->state.state.load();
  // The state only increases: a closed log may become aborted, and the first abort is kept.
  while (!is_aborted(current) && current < state &&
         !lines_->state.state.compare_exchange_weak(current, state)) {
  }
  lines_->writer.futex.fetch_add(1);
  futex_wake_all(lines_->writer.futex);
  lines_->waits.release_futex.fetch_add(1);
  futex_wake_all(lines_->waits.release_futex);
}

void DecisionLog::abort(std::uint32_t reason_code) noexcept {
  set_state(kAborted | reason_code);
}

std::optional<std::uint32_t> DecisionLog::abort_reason() const noexcept {
  const std::uint64_t state = lines_->state.state.load();
  if (!is_aborted(state)) {
    return std::nullopt;
  }
  return static_cast<std::uint32_t>(state);
}

// ---- DecisionWriter

DecisionWriter DecisionWriter::create(std::uint32_t num_readers, std::uint32_t capacity,
                                      unsigned local_processes) {
  if (!sizes_allowed(num_readers, capacity)) {
    throw std::invalid_argument(sizes_text(num_readers, capacity) + " must be within 1.." +
                                std::to_string(kMaxReaders) + " and 1.." +
                                std::to_string(kMaxCapacity));
  }
  const std::size_t size_bytes = size_for(num_readers, capacity);
  ScopedFd fd = make_sealed_file("megatron-adaptive-decisions", size_bytes);
  MappedRegion region = MappedRegion::shared(fd.get(), size_bytes);
  // New memory is filled with zeros, which is the initial value of every atomic. The header
  // contains the sizes.
  auto* header = new (region.data()) detail::HeaderLine{};
  header->magic = kMagic;
  header->version = kVersion;
  header->num_readers = num_readers;
  header->capacity = capacity;
  header->size_bytes = size_bytes;
  return DecisionWriter(std::move(region), num_readers, capacity,
                        spin_for(num_readers, local_processes), std::move(fd));
}

DecisionWriter::DecisionWriter(MappedRegion region, std::uint32_t num_readers,
                               std::uint32_t capacity, SpinBudget spin, ScopedFd fd)
    : DecisionLog(std::move(region), num_readers, capacity, spin), fd_(std::move(fd)) {}

DecisionWriter::~DecisionWriter() {
  if (region_.data() != nullptr && owner_ == ::getpid()) {
    close();
  }
}

void DecisionWriter::close() noexcept {
  set_state(kClosed);
}

std::uint64_t DecisionWriter::acknowledged_by(std::uint32_t reader) const {
  const std::uint64_t position = readers_[reader].acknowledged.load();
  if (position > published_ || published_ - position > capacity_) {
    throw Error("reader " + std::to_string(reader) + " claims position " +
                std::to_string(position) + " with " + std::to_string(published_) +
                " entries published and a capacity of " + std::to_string(capacity_) +
                ": the shared memory was overwritten");
  }
  return position;
}

DecisionWriter::Laggard DecisionWriter::slowest() const {
  // Reads each position only once. The reader that was the slowest may have passed another reader
  // meanwhile. With its newer position, the writer would overrun that other reader.
  Laggard slowest{0, acknowledged_by(0)};
  for (std::uint32_t reader = 1; reader < num_readers_; ++reader) {
    const std::uint64_t position = acknowledged_by(reader);
    if (position < slowest.position) {
      slowest = {reader, position};
    }
  }
  return slowest;
}

bool DecisionWriter::has_room() {
  if (published_ - seen_acknowledged_ < capacity_) {
    return true;
  }
  seen_acknowledged_ = slowest().position;
  return published_ - seen_acknowledged_ < capacity_;
}

bool DecisionWriter::wait_for_room(const Deadline& deadline) {
  const auto settled = [this] { return lines_->state.state.load() != kOpen || has_room(); };
  if (spin_.spin_until(settled)) {
    return true;
  }
  // Sets the flag before the check, so that no reader misses a sleeping writer. A reader moves its
  // position first and then reads the flag, and both accesses are sequentially consistent.
  lines_->waits.writer_sleeps.store(1);
  const bool ready = sleep_until(lines_->waits.release_futex, deadline, settled);
  lines_->waits.writer_sleeps.store(0);
  return ready;
}

WaitStatus DecisionWriter::try_publish(std::int64_t value) {
  const std::uint64_t state = lines_->state.state.load();
  if (state != kOpen) {
    return is_aborted(state) ? WaitStatus::kAborted : WaitStatus::kClosed;
  }
  if (!has_room()) {
    return WaitStatus::kNotYet;
  }
  entries_[published_ % capacity_].store(value, std::memory_order_relaxed);
  lines_->writer.published.store(++published_, std::memory_order_release);
  lines_->writer.futex.fetch_add(1);
  if (lines_->waits.sleeping_readers.load() != 0) {
    futex_wake_all(lines_->writer.futex);
  }
  return WaitStatus::kReady;
}

WaitStatus DecisionWriter::publish(std::int64_t value, const Deadline& deadline) {
  WaitStatus status = try_publish(value);
  while (status == WaitStatus::kNotYet && wait_for_room(deadline)) {
    status = try_publish(value);
  }
  return status;
}

// ---- DecisionReader

DecisionReader DecisionReader::attach(int fd, std::uint32_t reader_index,
                                      unsigned local_processes) {
  DecisionLog log = DecisionLog::attach(fd, local_processes);
  if (reader_index >= log.num_readers()) {
    throw std::invalid_argument("reader_index " + std::to_string(reader_index) +
                                " must be below num_readers " + std::to_string(log.num_readers()));
  }
  return DecisionReader(std::move(log), reader_index);
}

DecisionReader::DecisionReader(DecisionLog log, std::uint32_t reader_index)
    : DecisionLog(std::move(log)), index_(reader_index) {
  ReaderLine& line = readers_[index_];
  std::uint32_t nobody = 0;
  if (!line.taken_by.compare_exchange_strong(nobody, static_cast<std::uint32_t>(owner_))) {
    throw Error("reader_index " + std::to_string(index_) + " is taken by process " +
                std::to_string(nobody) + ": each reader needs its own");
  }
  position_ = line.acknowledged.load();
}

DecisionReader::~DecisionReader() {
  if (region_.data() != nullptr && owner_ == ::getpid()) {
    readers_[index_].taken_by.store(0);
  }
}

bool DecisionReader::has_entry() const {
  const std::uint64_t published = lines_->writer.published.load();
  if (published < position_ || published - position_ > capacity_) {
    throw Error("the writer claims " + std::to_string(published) + " entries while reader " +
                std::to_string(index_) + " has read " + std::to_string(position_) +
                " with a capacity of " + std::to_string(capacity_) +
                ": the shared memory was overwritten");
  }
  return published > position_;
}

bool DecisionReader::wait_for_entry(const Deadline& deadline) {
  const auto settled = [this] { return lines_->state.state.load() != kOpen || has_entry(); };
  if (spin_.spin_until(settled)) {
    return true;
  }
  // The reader is counted as sleeping before its last check, as in wait_for_room(). A reader that
  // is killed while it sleeps stays counted, which costs the writer only one system call per entry.
  lines_->waits.sleeping_readers.fetch_add(1);
  const bool ready = sleep_until(lines_->writer.futex, deadline, settled);
  lines_->waits.sleeping_readers.fetch_sub(1);
  return ready;
}

WaitStatus DecisionReader::try_next(std::int64_t& value) {
  // The state is read before the position. The log is closed only after the last entry, so if it is
  // closed here, an empty ring stays empty.
  const std::uint64_t state = lines_->state.state.load();
  if (is_aborted(state)) {
    return WaitStatus::kAborted;
  }
  if (!has_entry()) {
    return state == kOpen ? WaitStatus::kNotYet : WaitStatus::kClosed;
  }
  value = entries_[position_ % capacity_].load(std::memory_order_relaxed);
  readers_[index_].acknowledged.store(++position_);
  if (lines_->waits.writer_sleeps.load() != 0) {
    lines_->waits.release_futex.fetch_add(1);
    futex_wake_all(lines_->waits.release_futex);
  }
  return WaitStatus::kReady;
}

WaitStatus DecisionReader::next(std::int64_t& value, const Deadline& deadline) {
  WaitStatus status = try_next(value);
  while (status == WaitStatus::kNotYet && wait_for_entry(deadline)) {
    status = try_next(value);
  }
  return status;
}

}  // namespace adaptive
