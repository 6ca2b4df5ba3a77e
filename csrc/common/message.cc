#include "common/message.h"

#include <array>
#include <type_traits>

#include "common/error.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace adaptive {
namespace {

static_assert(std::is_trivially_copyable_v<Message>, "messages are copied as bytes");
static_assert(offsetof(Message, job) == 16 && offsetof(Message, step) == 32 &&
                  offsetof(Message, nbytes) == 48 && offsetof(Message, shape) == 72,
              "the fields of a message have fixed places");

struct Element {
  std::uint8_t bytes;
  std::uint8_t dlpack;  // DLDataTypeCode
};

// Ordered by code. For DLPack, 8-bit floats are bytes; `variant` specifies how to read them.
constexpr std::uint8_t kInt = 0, kUInt = 1, kFloat = 2, kBFloat = 4, kComplex = 5, kBool = 6;
constexpr std::array<Element, static_cast<std::size_t>(ElementType::kCount)> kElements{{
    {4, kFloat},
    {2, kFloat},
    {2, kBFloat},
    {8, kFloat},
    {8, kInt},
    {4, kInt},
    {2, kInt},
    {1, kInt},
    {1, kUInt},
    {1, kBool},
    {8, kComplex},
    {16, kComplex},
    {1, kUInt},
}};

const char* kind_name(MessageKind kind) noexcept {
  switch (kind) {
    case MessageKind::kForward:
      return "F";
    case MessageKind::kBackward:
      return "B";
    case MessageKind::kData:
      return "data";
    case MessageKind::kEnd:
      return "end";
  }
  return nullptr;
}

[[noreturn]] void refuse(int peer, const std::string& finding) {
  throw Error("a message from rank " + std::to_string(peer) + " has " + finding +
              "; do both ranks run the same version, and is nothing else writing to the channel?");
}

// Computes the size in bytes of a payload with the message's shape. Returns false if the size does
// not fit into 64 bits.
bool payload_bytes(const Message& message, std::uint64_t* result) noexcept {
  std::uint64_t bytes = element_bytes(message.dtype);
  bool empty = false;
  bool countable = true;
  for (int i = 0; i < message.dimensions; ++i) {
    const std::int64_t size = message.shape[i];
    if (size < 0) {
      return false;
    }
    empty = empty || size == 0;
    countable =
        !__builtin_mul_overflow(bytes, static_cast<std::uint64_t>(size), &bytes) && countable;
  }
  *result = empty ? 0 : bytes;
  return empty || countable;
}

std::string shape_text(const Message& message) {
  std::string text = "[";
  for (int i = 0; i < message.dimensions; ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(message.shape[i]);
  }
  return text + "]";
}

void check_piece(const Message& message, std::size_t room_bytes, int peer) {
  const bool inside = message.piece_bytes <= message.nbytes &&
                      message.offset <= message.nbytes - message.piece_bytes;
  if (!inside || (message.piece_bytes == 0 && message.nbytes != 0)) {
    refuse(peer, "a piece of " + std::to_string(message.piece_bytes) + " bytes at " +
                     std::to_string(message.offset) + " of " + std::to_string(message.nbytes));
  }
  if (message.piece_bytes > room_bytes) {
    refuse(peer, "a piece of " + std::to_string(message.piece_bytes) +
                     " bytes where there is room for " + std::to_string(room_bytes));
  }
}

// ---- CRC-32C, polynomial 0x1EDC6F41 reflected

constexpr std::array<std::uint32_t, 256> crc_table() noexcept {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) {
      value = (value >> 1) ^ ((value & 1) != 0 ? 0x82F6'3B78U : 0U);
    }
    table[byte] = value;
  }
  return table;
}

constexpr std::array<std::uint32_t, 256> kCrcTable = crc_table();

std::uint32_t crc_by_table(std::uint32_t crc, const unsigned char* data,
                           std::size_t size) noexcept {
  for (std::size_t i = 0; i < size; ++i) {
    crc = (crc >> 8) ^ kCrcTable[(crc ^ data[i]) & 0xFF];
  }
  return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) std::uint32_t crc_by_instruction(std::uint32_t crc,
                                                                   const unsigned char* data,
                                                                   std::size_t size) noexcept {
  std::uint64_t wide = crc;
  for (; size >= 8; data += 8, size -= 8) {
    std::uint64_t word;
    std::memcpy(&word, data, sizeof(word));
    wide = _mm_crc32_u64(wide, word);
  }
  return crc_by_table(static_cast<std::uint32_t>(wide), data, size);
}
#endif

}  // namespace

std::size_t element_bytes(ElementType dtype) noexcept {
  const auto code = static_cast<std::size_t>(dtype);
  return code < kElements.size() ? kElements[code].bytes : 0;
}

std::uint8_t dlpack_code(ElementType dtype) noexcept {
  const auto code = static_cast<std::size_t>(dtype);
  return code < kElements.size() ? kElements[code].dlpack : kUInt;
}

void check_message(const Message& message, std::uint64_t job, std::size_t room_bytes, int peer) {
  if (message.magic != kMessageMagic || message.version != kMessageVersion) {
    refuse(peer, "magic " + std::to_string(message.magic) + " and version " +
                     std::to_string(message.version) + ", not " + std::to_string(kMessageMagic) +
                     " and " + std::to_string(kMessageVersion));
  }
  if (message.job != job) {
    refuse(peer, "job " + std::to_string(message.job) + ", this one is " + std::to_string(job));
  }
  if (kind_name(message.kind) == nullptr) {
    refuse(peer, "unknown kind " + std::to_string(static_cast<int>(message.kind)));
  }
  if (element_bytes(message.dtype) == 0) {
    refuse(peer, "unknown element type " + std::to_string(static_cast<int>(message.dtype)));
  }
  if (message.dimensions > kMaxDimensions) {
    refuse(peer, std::to_string(message.dimensions) + " dimensions, at most " +
                     std::to_string(kMaxDimensions) + " can be");
  }
  std::uint64_t bytes = 0;
  if (!payload_bytes(message, &bytes) || bytes != message.nbytes) {
    refuse(peer, "shape " + shape_text(message) + " of " +
                     std::to_string(element_bytes(message.dtype)) + "-byte elements and " +
                     std::to_string(message.nbytes) + " bytes, which do not agree");
  }
  if (message.has_crc > 1) {
    refuse(peer, "has_crc " + std::to_string(message.has_crc));
  }
  check_piece(message, room_bytes, peer);
}

std::string describe(const Message& message) {
  const char* kind = kind_name(message.kind);
  return std::string(kind == nullptr ? "?" : kind) + " chunk " + std::to_string(message.chunk) +
         " microbatch " + std::to_string(message.microbatch) + " of step " +
         std::to_string(message.step);
}

std::uint32_t crc32c(const void* data, std::size_t size_bytes) noexcept {
  const auto* bytes = static_cast<const unsigned char*>(data);
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2")) {
    return ~crc_by_instruction(~0U, bytes, size_bytes);
  }
#endif
  return ~crc_by_table(~0U, bytes, size_bytes);
}

}  // namespace adaptive
