// The header that precedes every payload in every transport, and the rules for its fields.
//
// A Message comes from another process, so its fields are not trusted. Only check_message() decides
// whether a message is valid. docs/reference/transport.md describes the bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

namespace adaptive {

constexpr std::uint32_t kMessageMagic = 0x4D41'5032;  // "MAP2"
constexpr std::uint16_t kMessageVersion = 1;
constexpr int kMaxDimensions = 7;

// The first kinds are the pipeline's actions; the other kinds are used by the transports.
enum class MessageKind : std::uint8_t { kForward = 0, kBackward = 1, kData = 2, kEnd = 255 };

// Element types by code. The bytes of a payload are not interpreted here. The table in message.cc
// has the size and the DLPack type of each code.
enum class ElementType : std::uint8_t {
  kFloat32 = 0,
  kFloat16,
  kBFloat16,
  kFloat64,
  kInt64,
  kInt32,
  kInt16,
  kInt8,
  kUInt8,
  kBool,
  kComplex64,
  kComplex128,
  kFloat8,  // any 8-bit float; `variant` says which one
  kCount
};

// The header: 128 bytes, little endian, without padding between the fields.
struct Message {
  std::uint32_t magic = kMessageMagic;
  std::uint16_t version = kMessageVersion;
  MessageKind kind = MessageKind::kData;
  std::uint8_t dimensions = 0;
  ElementType dtype = ElementType::kUInt8;
  std::uint8_t variant = 0;
  std::uint8_t has_crc = 0;
  std::uint8_t reserved = 0;
  std::uint32_t crc = 0;  // CRC-32C of this piece's bytes, if has_crc
  std::uint64_t job = 0;  // the same in all processes of a job
  // number of the message on its channel, starting at 0; equal in all pieces
  std::uint64_t sequence = 0;
  std::int64_t step = 0;
  std::int32_t chunk = 0;
  std::int32_t microbatch = 0;
  std::uint64_t nbytes = 0;       // size of the whole payload
  std::uint64_t offset = 0;       // position of this piece in the payload
  std::uint64_t piece_bytes = 0;  // size of this piece; equal to nbytes if there is only one piece
  std::int64_t shape[kMaxDimensions] = {};  // [0, dimensions)
};
static_assert(sizeof(Message) == 128, "the message is part of the wire format");

// Returns the size of an element in bytes, or 0 for a code that is not in the table.
std::size_t element_bytes(ElementType dtype) noexcept;

// Returns DLPack's type code. For 8-bit floats and unknown codes, this is the code of unsigned
// integers.
std::uint8_t dlpack_code(ElementType dtype) noexcept;

// Checks a message from `peer`. Throws Error, with the peer and the field, unless the message
// belongs to `job`, its numbers are consistent (shape times element size is nbytes, and the piece
// lies inside the payload), and piece_bytes is at most `room_bytes`. The caller must check sequence
// and offset, because only the caller knows the expected values.
void check_message(const Message& message, std::uint64_t job, std::size_t room_bytes, int peer);

// Returns text for error messages, such as "F chunk 1 microbatch 7 of step 12".
std::string describe(const Message& message);

// Returns the CRC-32C, computed with the processor's instruction if available.
std::uint32_t crc32c(const void* data, std::size_t size_bytes) noexcept;

}  // namespace adaptive
