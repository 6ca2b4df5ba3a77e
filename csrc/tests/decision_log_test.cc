// Tests of the decision log with real processes. Every reader is a forked process.
#include "shm/decision_log.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "common/error.h"
#include "tests/check.h"

namespace {

using adaptive::DecisionReader;
using adaptive::DecisionWriter;
using adaptive::WaitStatus;
using adaptive::testing::check;
using adaptive::testing::check_throws;
using adaptive::testing::Child;
using adaptive::testing::patient;
using adaptive::testing::soon;

std::int64_t value_at(std::uint64_t position) {
  return static_cast<std::int64_t>(position * 0x9e3779b97f4a7c15ULL);
}

// Reads until the log is closed. Checks that every value appears exactly once and in order.
void read_all(int fd, std::uint32_t index, std::uint64_t count, unsigned pause_every) {
  DecisionReader reader = DecisionReader::attach(fd, index, 0);
  for (std::uint64_t position = 0; position < count; ++position) {
    std::int64_t value = 0;
    check(reader.next(value, patient()) == WaitStatus::kReady, "an entry");
    check(value == value_at(position), "the values in order");
    if (pause_every != 0 && position % pause_every == 0) {
      ::usleep(200);
    }
  }
  std::int64_t value = 0;
  check(reader.next(value, patient()) == WaitStatus::kClosed, "closed after the last entry");
}

void publish_many(std::uint32_t readers, std::uint32_t capacity) {
  constexpr std::uint64_t kCount = 20000;
  DecisionWriter writer = DecisionWriter::create(readers, capacity, 0);
  std::vector<std::unique_ptr<Child>> children;
  for (std::uint32_t index = 0; index < readers; ++index) {
    // The second reader is slow, so that the ring is full repeatedly.
    const unsigned pause_every = index == 1 ? 500 : 0;
    children.push_back(std::make_unique<Child>(
        [&, index, pause_every] { read_all(writer.fd(), index, kCount, pause_every); }));
  }
  for (std::uint64_t position = 0; position < kCount; ++position) {
    check(writer.publish(value_at(position), patient()) == WaitStatus::kReady, "room");
  }
  writer.close();
  for (const auto& child : children) {
    child->join();
  }
}

TEST(every_reader_sees_everything_in_order) {
  publish_many(1, 1);
  publish_many(3, 7);
  publish_many(2, 1024);
}

TEST(a_reader_s_abort_wakes_a_sleeping_writer) {
  DecisionWriter writer = DecisionWriter::create(1, 1, 0);
  check(writer.try_publish(1) == WaitStatus::kReady, "room");
  Child child([&writer] {
    DecisionReader reader = DecisionReader::attach(writer.fd(), 0, 0);
    ::usleep(20000);
    reader.abort(5);
  });
  check(writer.publish(2, patient()) == WaitStatus::kAborted, "aborted");
  child.join();
}

TEST(a_killed_reader_costs_a_deadline_and_leaves_its_place_taken) {
  DecisionWriter writer = DecisionWriter::create(1, 2, 0);
  Child child([&writer] {
    DecisionReader reader = DecisionReader::attach(writer.fd(), 0, 0);
    std::int64_t value = 0;
    check(reader.next(value, patient()) == WaitStatus::kReady, "an entry");
    ::pause();
  });
  check(writer.publish(1, patient()) == WaitStatus::kReady, "room");
  while (writer.publish(2, soon(5)) == WaitStatus::kReady) {
  }
  child.kill();
  check(writer.publish(3, soon(5)) == WaitStatus::kNotYet, "no room");
  check_throws<adaptive::Error>([&] { DecisionReader::attach(writer.fd(), 0, 0); }, "is taken by");
}

TEST(a_place_given_back_continues_where_it_was) {
  DecisionWriter writer = DecisionWriter::create(1, 4, 0);
  std::int64_t value = 0;
  check(writer.try_publish(10) == WaitStatus::kReady, "room");
  check(writer.try_publish(11) == WaitStatus::kReady, "room");
  {
    DecisionReader reader = DecisionReader::attach(writer.fd(), 0, 0);
    check(reader.try_next(value) == WaitStatus::kReady && value == 10, "the first");
    DecisionReader moved = std::move(reader);
    check(moved.position() == 1, "the position to move along");
  }
  DecisionReader reader = DecisionReader::attach(writer.fd(), 0, 0);
  check(reader.try_next(value) == WaitStatus::kReady && value == 11, "the second");
}

TEST(a_forked_copy_does_not_close_the_log) {
  auto writer = std::make_unique<DecisionWriter>(DecisionWriter::create(1, 4, 0));
  DecisionReader reader = DecisionReader::attach(writer->fd(), 0, 0);
  Child([&writer] { writer.reset(); }).join();
  std::int64_t value = 0;
  check(reader.try_next(value) == WaitStatus::kNotYet, "an open log");
  writer.reset();
  check(reader.try_next(value) == WaitStatus::kClosed, "closed by its maker");
}

adaptive::ScopedFd memory_file(std::size_t size_bytes, bool sealed) {
  adaptive::ScopedFd fd(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  check(fd && ::ftruncate(fd.get(), static_cast<off_t>(size_bytes)) == 0, "memory");
  if (sealed) {
    ::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  }
  return fd;
}

TEST(foreign_memory_is_refused) {
  const auto attach = [](int fd) { DecisionReader::attach(fd, 0, 0); };
  check_throws<adaptive::Error>([&] { attach(memory_file(4096, false).get()); }, "not sealed");
  check_throws<adaptive::Error>([&] { attach(memory_file(64, true).get()); }, "64 bytes");
  check_throws<adaptive::Error>([&] { attach(memory_file(4096, true).get()); }, "other bytes");
}

// Overwrites 32 or 64 bits of a log's memory, as a faulty peer could.
template <typename Value>
void overwrite(const DecisionWriter& writer, std::size_t offset, Value value) {
  auto region = adaptive::MappedRegion::shared(writer.fd(), offset + sizeof(Value));
  *reinterpret_cast<volatile Value*>(region.data() + offset) = value;
}

TEST(overwritten_memory_is_noticed) {
  constexpr std::size_t kVersionOffset = 8;
  constexpr std::size_t kNumReadersOffset = 12;
  constexpr std::size_t kCapacityOffset = 16;
  constexpr std::size_t kPublishedOffset = 64;
  constexpr std::size_t kAcknowledgedOffset = 256;
  const auto attach = [](const DecisionWriter& writer) {
    DecisionReader::attach(writer.fd(), 0, 0);
  };
  {
    DecisionWriter writer = DecisionWriter::create(1, 8, 0);
    overwrite<std::uint32_t>(writer, kVersionOffset, 9);
    check_throws<adaptive::Error>([&] { attach(writer); }, "its version is 9");
  }
  for (const std::uint32_t count : {0U, 2U, 0xffff'ffffU}) {
    DecisionWriter writer = DecisionWriter::create(1, 8, 0);
    overwrite<std::uint32_t>(writer, kNumReadersOffset, count);
    check_throws<adaptive::Error>([&] { attach(writer); }, "do not fit");
  }
  for (const std::uint32_t capacity : {0U, 7U, 0xffff'ffffU}) {
    DecisionWriter writer = DecisionWriter::create(1, 8, 0);
    overwrite<std::uint32_t>(writer, kCapacityOffset, capacity);
    check_throws<adaptive::Error>([&] { attach(writer); }, "do not fit");
  }
  DecisionWriter writer = DecisionWriter::create(1, 8, 0);
  DecisionReader reader = DecisionReader::attach(writer.fd(), 0, 0);
  std::int64_t value = 0;
  overwrite<std::uint64_t>(writer, kPublishedOffset, ~0ULL);
  check_throws<adaptive::Error>([&] { reader.try_next(value); }, "overwritten");
  for (int i = 0; i < 8; ++i) {
    check(writer.try_publish(i) == WaitStatus::kReady, "room");
  }
  overwrite<std::uint64_t>(writer, kAcknowledgedOffset, 1000);
  check_throws<adaptive::Error>([&] { writer.try_publish(8); }, "overwritten");
}

}  // namespace
