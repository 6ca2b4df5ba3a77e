// Tests of the rules for messages, checksums, and messages in several pieces.
#include "common/message.h"

#include <algorithm>
#include <cstring>

#include "common/assembler.h"
#include "common/error.h"
#include "tests/pair.h"

namespace adaptive::testing {
namespace {

Message sound(std::size_t size = 24) {
  Message message = message_of(size, 4);
  message.job = kJob;
  message.piece_bytes = size;
  return message;
}

TEST(sound_messages_pass) {
  for (const std::size_t size : {0, 1, 24}) {
    check_message(sound(size), kJob, 24, 3);
  }
  Message scalar = sound(8);
  scalar.dimensions = 0;
  scalar.dtype = ElementType::kInt64;
  check_message(scalar, kJob, 8, 3);
  Message empty = sound(0);
  empty.dimensions = 3;
  empty.shape[0] = std::int64_t{1} << 40;
  empty.shape[1] = std::int64_t{1} << 40;
  empty.shape[2] = 0;
  check_message(empty, kJob, 0, 3);
  for (int code = 0; code < static_cast<int>(ElementType::kCount); ++code) {
    Message message = sound(0);
    message.dtype = static_cast<ElementType>(code);
    message.shape[0] = 3;
    message.nbytes = 3 * element_bytes(message.dtype);
    message.piece_bytes = message.nbytes;
    check_message(message, kJob, 48, 3);
  }
}

TEST(unsound_messages_are_named) {
  const auto refused = [](const std::function<void(Message&)>& change, const std::string& words) {
    Message message = sound();
    change(message);
    check_throws<Error>([&] { check_message(message, kJob, 24, 3); }, words);
    check_throws<Error>([&] { check_message(message, kJob, 24, 3); }, "from rank 3");
  };
  refused([](Message& m) { m.magic ^= 1; }, "magic");
  refused([](Message& m) { m.version = 2; }, "version 2");
  refused([](Message& m) { m.job = 0; }, "job 0");
  refused([](Message& m) { m.kind = static_cast<MessageKind>(3); }, "kind 3");
  refused([](Message& m) { m.dtype = ElementType::kCount; }, "element type 13");
  refused([](Message& m) { m.dimensions = 8; }, "8 dimensions");
  refused([](Message& m) { m.shape[0] = 23; }, "shape [23] of 1-byte elements and 24 bytes");
  refused([](Message& m) { m.shape[0] = -24; }, "shape [-24]");
  refused([](Message& m) { m.dtype = ElementType::kInt16; }, "2-byte");
  refused([](Message& m) { m.has_crc = 7; }, "has_crc 7");
  refused([](Message& m) { m.offset = 1; }, "a piece of 24 bytes at 1 of 24");
  refused([](Message& m) { m.piece_bytes = 25; }, "a piece of 25 bytes");
  refused([](Message& m) { m.piece_bytes = 0; }, "a piece of 0 bytes");
  refused([](Message& m) { m.offset = ~std::uint64_t{0}; }, "a piece of");
  refused(
      [](Message& m) {
        m.nbytes = m.piece_bytes = 25;
        m.shape[0] = 25;
      },
      "room for 24");
  refused(
      [](Message& m) {
        m.dimensions = 2;
        m.shape[0] = m.shape[1] = std::int64_t{1} << 32;
        m.nbytes = m.piece_bytes = 0;
      },
      "do not agree");
}

TEST(checksums) {
  check(crc32c("123456789", 9) == 0xE306'9283, "the published value");
  check(crc32c("", 0) == 0, "nothing");
  const Bytes zeros(32, 0);
  check(crc32c(zeros.data(), zeros.size()) == 0x8A91'36AA, "32 zeros, RFC 3720");
  const Bytes bytes = pattern(1000, 1);
  for (std::size_t shift = 0; shift < 16; ++shift) {
    Bytes changed = bytes;
    changed[shift * 61] ^= 1;
    check(crc32c(changed.data(), 1000) != crc32c(bytes.data(), 1000), "one bit makes a difference");
  }
}

TEST(descriptions) {
  check(describe(message_of(1, 8)) == "F chunk 3 microbatch 8 of step -7", "a description");
  check(dlpack_code(ElementType::kBFloat16) == 4 && dlpack_code(ElementType::kFloat8) == 1,
        "DLPack's codes");
}

Message piece_of(std::uint64_t sequence, std::size_t offset, std::size_t size, std::size_t whole) {
  Message message = sound(whole);
  message.sequence = sequence;
  message.offset = offset;
  message.piece_bytes = size;
  return message;
}

TEST(pieces_make_the_whole) {
  Assembler assembler(1 << 20);
  for (std::uint64_t sequence = 0; sequence < 3; ++sequence) {
    const Bytes bytes = pattern(10'000, static_cast<unsigned>(sequence));
    const auto* data = reinterpret_cast<const std::byte*>(bytes.data());
    check(!assembler.busy(), "nothing half there");
    check(!assembler.add(piece_of(sequence, 0, 4000, 10'000), data, 2), "not yet");
    check(assembler.busy(), "half there");
    check(!assembler.add(piece_of(sequence, 4000, 5999, 10'000), data + 4000, 2), "not yet");
    auto whole = assembler.add(piece_of(sequence, 9999, 1, 10'000), data + 9999, 2);
    check(whole && whole->peer == 2 && whole->message.piece_bytes == 10'000, "the whole");
    check(std::memcmp(whole->payload.data(), bytes.data(), bytes.size()) == 0, "its bytes");
  }
}

TEST(pieces_that_are_not_due) {
  const Bytes bytes = pattern(100, 1);
  const auto* data = reinterpret_cast<const std::byte*>(bytes.data());
  const auto refused = [&](const Message& second, const std::string& words) {
    Assembler assembler(100);
    assembler.add(piece_of(5, 0, 40, 100), data, 2);
    check_throws<Error>([&] { assembler.add(second, data, 2); }, words);
  };
  refused(piece_of(5, 0, 40, 100), "was not expected: 40 bytes of message 5");
  refused(piece_of(5, 60, 40, 100), "was not expected");
  refused(piece_of(6, 40, 40, 100), "was not expected");
  refused(piece_of(5, 40, 40, 99), "was not expected");
  refused(piece_of(5, 40, 61, 100), "was not expected");
  Assembler assembler(100);
  check_throws<Error>([&] { assembler.add(piece_of(0, 0, 50, 101), data, 2); }, "limit of 100");
  check_throws<Error>([&] { assembler.add(piece_of(0, 50, 50, 100), data, 2); },
                      "was not expected");
}

}  // namespace
}  // namespace adaptive::testing
