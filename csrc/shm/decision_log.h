// A log through which the leader of a tensor-parallel group on one node announces each next
// pipeline action to its followers, without a collective. One writer and N readers share a ring of
// K 64-bit entries. Every reader reads every entry in order, at its own pace.
//
//   line     0        1          2        3         4 .. 4+N-1          after the lines
//        +--------+---------+---------+---------+------------------+------------------------+
//        | header | writer: | state:  | waits:  | reader i:        | entries 0 .. K-1       |
//        | magic, |published| open,   | sleepers| acknowledged     | entry of position p is |
//        | sizes  | futex   | closed, | release |                  | at p mod K             |
//        |        |         | aborted | futex   |                  |                        |
//        +--------+---------+---------+---------+------------------+------------------------+
//          never    writer    anybody   sleepers   reader i only      writer only
//          changes
//
// The writer waits while acknowledged + K == published, so that it never overruns the slowest
// reader. The memory is an anonymous file (memfd) with a sealed size. It is freed when the last
// process that maps it exits, and no peer can make an access to it fault. The contents are not
// trusted: sizes are checked once and copied out of the memory, and positions are checked at each
// use.
//
// The log does not notice when a process exits. Instead, every wait has a deadline.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <optional>

#include "common/deadline.h"
#include "common/futex.h"
#include "common/mapped_region.h"
#include "common/scoped_fd.h"

namespace adaptive {

enum class WaitStatus {
  kReady,    // done
  kNotYet,   // not possible before the deadline; nothing changed, so the call may be repeated
  kClosed,   // the other side closed and nothing is left to read
  kAborted,  // abort() was called; see abort_reason()
};

namespace detail {
struct Lines;
struct ReaderLine;
}  // namespace detail

// The base of both ends: the mapping, its checked sizes, and the state that can end every wait.
class DecisionLog {
 public:
  static constexpr std::uint32_t kMaxReaders = 1024;
  static constexpr std::uint32_t kMaxCapacity = 1U << 20;

  std::uint32_t num_readers() const noexcept { return num_readers_; }
  std::uint32_t capacity() const noexcept { return capacity_; }

  // Aborts the log for both sides, and wakes all sleepers. May be called from any thread or
  // process. Unread entries are lost. If it is called several times, only the first reason is kept.
  void abort(std::uint32_t reason_code) noexcept;

  // Returns the reason that was passed to abort(), if the log was aborted.
  std::optional<std::uint32_t> abort_reason() const noexcept;

 protected:
  DecisionLog(MappedRegion region, std::uint32_t num_readers, std::uint32_t capacity,
              SpinBudget spin);

  // Checks and maps the file behind `fd`. Throws Error if it is not a decision log.
  static DecisionLog attach(int fd, unsigned local_processes);

  void set_state(std::uint64_t state) noexcept;

  // Declared first, because the members below use it.
  MappedRegion region_;
  detail::Lines* lines_;
  detail::ReaderLine* readers_;
  std::atomic<std::int64_t>* entries_;
  std::uint32_t num_readers_;
  std::uint32_t capacity_;
  SpinBudget spin_;
  // Only the process that created this object closes the log; a forked child does not.
  pid_t owner_;
};

// The leader's end. One thread at a time may publish; any thread may call abort() and close().
class DecisionWriter : public DecisionLog {
 public:
  // Creates a log. local_processes is the number of busy processes that share this node's CPUs (0:
  // the writer and its readers); it determines how long waits spin. Throws std::invalid_argument,
  // SystemError.
  static DecisionWriter create(std::uint32_t num_readers, std::uint32_t capacity,
                               unsigned local_processes);

  DecisionWriter(DecisionWriter&&) noexcept = default;
  DecisionWriter& operator=(DecisionWriter&&) = delete;
  ~DecisionWriter();

  // Appends value and wakes sleeping readers. Waits only if the slowest reader is capacity()
  // entries behind. Throws Error if a reader's position is invalid.
  WaitStatus publish(std::int64_t value, const Deadline& deadline);

  // The same without waiting.
  WaitStatus try_publish(std::int64_t value);

  // Closes the log. Readers still receive all published entries. Later calls of publish() and
  // try_publish() return kClosed.
  void close() noexcept;

  // Returns the descriptor of the shared memory, to pass to readers. The writer keeps owning it.
  int fd() const noexcept { return fd_.get(); }

  // Returns the number of entries published so far.
  std::uint64_t published() const noexcept { return published_; }

  // Returns the reader that is furthest behind. Throws Error if a reader's position is invalid.
  std::uint32_t slowest_reader() const { return slowest().reader; }

 private:
  DecisionWriter(MappedRegion region, std::uint32_t num_readers, std::uint32_t capacity,
                 SpinBudget spin, ScopedFd fd);

  struct Laggard {
    std::uint32_t reader;
    std::uint64_t position;
  };

  Laggard slowest() const;
  bool has_room();
  bool wait_for_room(const Deadline& deadline);
  std::uint64_t acknowledged_by(std::uint32_t reader) const;

  ScopedFd fd_;
  std::uint64_t published_ = 0;
  // Last known position of the slowest reader. The readers' lines are read again only when the ring
  // seems to be full.
  std::uint64_t seen_acknowledged_ = 0;
};

// A follower's end of the log. One thread at a time may read; any thread may call abort().
class DecisionReader : public DecisionLog {
 public:
  // Opens the log in fd as the reader with number reader_index, which no other running reader may
  // use. The caller owns fd and may close it afterwards. Continues after the last entry that this
  // index acknowledged. Throws std::invalid_argument, SystemError, and Error for memory that is not
  // a decision log.
  static DecisionReader attach(int fd, std::uint32_t reader_index, unsigned local_processes);

  DecisionReader(DecisionReader&&) noexcept = default;
  DecisionReader& operator=(DecisionReader&&) = delete;
  ~DecisionReader();

  // Stores the next entry in value and acknowledges it. Throws Error if the writer's position is
  // invalid.
  WaitStatus next(std::int64_t& value, const Deadline& deadline);

  // The same without waiting.
  WaitStatus try_next(std::int64_t& value);

  std::uint32_t index() const noexcept { return index_; }

  // Returns the number of entries read so far.
  std::uint64_t position() const noexcept { return position_; }

 private:
  DecisionReader(DecisionLog log, std::uint32_t reader_index);

  bool has_entry() const;
  bool wait_for_entry(const Deadline& deadline);

  std::uint32_t index_;
  std::uint64_t position_;
};

}  // namespace adaptive
