#include "common/hello.h"

#include <cstring>
#include <stdexcept>

#include "common/error.h"

namespace adaptive {
namespace {

constexpr std::uint32_t kHelloMagic = 0x4D41'484C;   // "MAHL"
constexpr std::uint32_t kRecordMagic = 0x4D41'5243;  // "MARC"

struct HelloLayout {
  std::uint32_t magic;
  std::uint16_t version;
  std::uint8_t verdict;
  std::uint8_t zero;
  Token token;
  std::int32_t rank;
  std::int32_t target;
  char purpose[kMaxPurpose + 1];  // zeros behind its end
};
struct RecordLayout {
  std::uint32_t magic;
  std::uint32_t num_bytes;
  std::uint32_t num_fds;
};
static_assert(sizeof(HelloLayout) == kHelloBytes && sizeof(RecordLayout) == kRecordHeaderBytes,
              "the layouts are part of the wire format");

}  // namespace

HelloBytes encode_hello(const Hello& hello) {
  if (hello.self.purpose.size() > kMaxPurpose) {
    throw std::invalid_argument("purpose '" + hello.self.purpose + "' must have at most " +
                                std::to_string(kMaxPurpose) + " characters");
  }
  HelloLayout layout{};
  layout.magic = kHelloMagic;
  layout.version = hello.version;
  layout.verdict = static_cast<std::uint8_t>(hello.verdict);
  if (hello.verdict == Verdict::kWelcome) {
    layout.token = hello.self.token;
  }
  layout.rank = hello.self.rank;
  layout.target = hello.target;
  hello.self.purpose.copy(layout.purpose, kMaxPurpose);
  HelloBytes bytes;
  std::memcpy(bytes.data(), &layout, sizeof(layout));
  return bytes;
}

std::optional<Hello> parse_hello(const std::uint8_t* bytes, std::size_t size_bytes) {
  HelloLayout layout{};
  if (size_bytes == sizeof(layout)) {
    std::memcpy(&layout, bytes, sizeof(layout));
  }
  if (layout.magic != kHelloMagic) {
    return std::nullopt;
  }
  Hello hello;
  hello.version = layout.version;
  if (hello.version != kLinkVersion) {
    hello.verdict = Verdict::kOtherVersion;
    return hello;
  }
  if (layout.verdict >= static_cast<std::uint8_t>(Verdict::kCount) || layout.zero != 0 ||
      layout.purpose[kMaxPurpose] != 0) {
    return std::nullopt;
  }
  hello.verdict = static_cast<Verdict>(layout.verdict);
  hello.self.token = layout.token;
  hello.self.rank = layout.rank;
  hello.target = layout.target;
  hello.self.purpose = layout.purpose;
  return hello;
}

Verdict judge_hello(const Hello& hello, const Identity& self) {
  if (hello.version != kLinkVersion) {
    return Verdict::kOtherVersion;
  }
  if (!same_token(hello.self.token, self.token)) {
    return Verdict::kOtherToken;
  }
  return hello.target == self.rank ? Verdict::kWelcome : Verdict::kOtherTarget;
}

const char* reason_of(Verdict verdict) {
  switch (verdict) {
    case Verdict::kWelcome:
      return "it agrees";
    case Verdict::kOtherVersion:
      return "it runs another version of this package";
    case Verdict::kOtherToken:
      return "it belongs to another job, or to an earlier start of this one";
    case Verdict::kOtherTarget:
      return "it is another rank";
    case Verdict::kCount:
      break;
  }
  return "for a reason that this version does not know";
}

bool same_token(const Token& one, const Token& other) noexcept {
  unsigned different = 0;
  for (std::size_t i = 0; i < one.size(); ++i) {
    different |= static_cast<unsigned>(one[i] ^ other[i]);
  }
  return different == 0;
}

RecordHeader encode_record_header(std::size_t num_bytes, std::size_t num_fds) {
  if (num_bytes > 0xffff'ffffU) {
    throw std::invalid_argument("a record of " + std::to_string(num_bytes) + " bytes is too long");
  }
  const RecordLayout layout{kRecordMagic, static_cast<std::uint32_t>(num_bytes),
                            static_cast<std::uint32_t>(num_fds)};
  RecordHeader header;
  std::memcpy(header.data(), &layout, sizeof(layout));
  return header;
}

std::size_t parse_record_header(const std::uint8_t* bytes, std::size_t size_bytes,
                                std::size_t max_bytes, std::size_t num_fds) {
  RecordLayout layout{};
  if (size_bytes == sizeof(layout)) {
    std::memcpy(&layout, bytes, sizeof(layout));
  }
  if (layout.magic != kRecordMagic) {
    throw Error("the peer did not send a record: do both run the same version?");
  }
  const std::size_t announced_bytes = layout.num_bytes;
  const std::size_t announced_fds = layout.num_fds;
  if (announced_bytes > max_bytes) {
    throw Error("a record of " + std::to_string(announced_bytes) + " bytes is above the limit of " +
                std::to_string(max_bytes));
  }
  if (announced_fds != num_fds) {
    throw Error("a record with " + std::to_string(announced_fds) + " descriptors came where " +
                std::to_string(num_fds) + " were expected");
  }
  return announced_bytes;
}

}  // namespace adaptive
