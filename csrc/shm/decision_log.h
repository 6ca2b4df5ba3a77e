// How the leader of a tensor-parallel group on one node tells its followers which pipeline action
// it takes, without a collective: one writer, N readers, a ring of K 64-bit entries in shared
// memory. Every reader sees every entry, in order, at its own pace.
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
// The writer never overruns the slowest reader: with acknowledged + K == published it waits. The
// memory is an anonymous file (memfd) with a sealed size, so that it disappears with the last
// process that maps it and no peer can make an access to it fault. Apart from that, nothing found
// in it is trusted: sizes are checked once and kept outside it, positions are checked at each use.
//
// What this file does not do: notice that a process died. Every wait has a deadline instead.
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
  kNotYet,   // not possible within the time given; nothing changed, the call may be repeated
  kClosed,   // the other side closed and nothing is left to read
  kAborted,  // somebody called abort(); see abort_reason()
};

namespace detail {
struct Lines;
struct ReaderLine;
}  // namespace detail

// What the two ends share: the mapping, its checked sizes, and the state that ends every wait.
class DecisionLog {
 public:
  static constexpr std::uint32_t kMaxReaders = 1024;
  static constexpr std::uint32_t kMaxCapacity = 1U << 20;

  std::uint32_t num_readers() const noexcept { return num_readers_; }
  std::uint32_t capacity() const noexcept { return capacity_; }

  // Ends the log for both sides at once, waking all who sleep, from any thread or process; entries
  // not read yet are lost. The first reason stays.
  void abort(std::uint32_t reason_code) noexcept;

  // The reason given to abort(), if anybody called it.
  std::optional<std::uint32_t> abort_reason() const noexcept;

 protected:
  DecisionLog(MappedRegion region, std::uint32_t num_readers, std::uint32_t capacity,
              SpinBudget spin);

  // Checks what a descriptor holds and maps it. Throws Error when it is not a decision log.
  static DecisionLog attach(int fd, unsigned local_processes);

  void set_state(std::uint64_t state) noexcept;

  // Declared first, used by everything below it.
  MappedRegion region_;
  detail::Lines* lines_;
  detail::ReaderLine* readers_;
  std::atomic<std::int64_t>* entries_;
  std::uint32_t num_readers_;
  std::uint32_t capacity_;
  SpinBudget spin_;
  // A fork copies the object, not the role: only the process that made it closes the log.
  pid_t owner_;
};

// The leader's end. One thread at a time may publish; abort() and close() may come from any.
class DecisionWriter : public DecisionLog {
 public:
  // Makes a log. local_processes (0: the writer and its readers) is how many busy processes share
  // this node's CPUs; it decides how long waits spin. Throws std::invalid_argument, SystemError.
  static DecisionWriter create(std::uint32_t num_readers, std::uint32_t capacity,
                               unsigned local_processes);

  DecisionWriter(DecisionWriter&&) noexcept = default;
  DecisionWriter& operator=(DecisionWriter&&) = delete;
  ~DecisionWriter();

  // Appends value and wakes sleeping readers. Returns at once unless the slowest reader is
  // capacity() entries behind. Throws Error when a reader's position is impossible.
  WaitStatus publish(std::int64_t value, const Deadline& deadline);

  // The same without waiting.
  WaitStatus try_publish(std::int64_t value);

  // Ends the log in order: readers still get what was published. Publishing afterwards is kClosed.
  void close() noexcept;

  // The shared memory, to be handed to readers. Stays with the writer.
  int fd() const noexcept { return fd_.get(); }

  // Number of entries published so far.
  std::uint64_t published() const noexcept { return published_; }

  // The reader that is furthest behind. Throws Error when a reader's position is impossible.
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
  // What the slowest reader had acknowledged when last looked at: its lines stay untouched
  // until the ring seems full.
  std::uint64_t seen_acknowledged_ = 0;
};

// A follower's end. One thread at a time may read; abort() may come from any.
class DecisionReader : public DecisionLog {
 public:
  // Takes reader_index, which no live reader may hold, of the log in fd; fd stays the caller's and
  // may be closed afterwards. Continues after the last entry that this index acknowledged. Throws
  // std::invalid_argument, SystemError, and Error for memory that is not a decision log.
  static DecisionReader attach(int fd, std::uint32_t reader_index, unsigned local_processes);

  DecisionReader(DecisionReader&&) noexcept = default;
  DecisionReader& operator=(DecisionReader&&) = delete;
  ~DecisionReader();

  // Stores the next entry in value and acknowledges it. Throws Error when the writer's position is
  // impossible.
  WaitStatus next(std::int64_t& value, const Deadline& deadline);

  // The same without waiting.
  WaitStatus try_next(std::int64_t& value);

  std::uint32_t index() const noexcept { return index_; }

  // Number of entries read so far.
  std::uint64_t position() const noexcept { return position_; }

 private:
  DecisionReader(DecisionLog log, std::uint32_t reader_index);

  bool has_entry() const;
  bool wait_for_entry(const Deadline& deadline);

  std::uint32_t index_;
  std::uint64_t position_;
};

}  // namespace adaptive
