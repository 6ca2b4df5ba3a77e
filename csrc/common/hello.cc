#include "common/hello.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "common/error.h"

namespace adaptive {
namespace {

constexpr std::uint32_t kHelloMagic = 0x4D41'484C;   // "MAHL"
constexpr std::uint32_t kRecordMagic = 0x4D41'5243;  // "MARC"

constexpr std::size_t kVersionAt = 4;
constexpr std::size_t kVerdictAt = 6;
constexpr std::size_t kTokenAt = 8;
constexpr std::size_t kRankAt = 24;
constexpr std::size_t kTargetAt = 28;
constexpr std::size_t kPurposeAt = 32;
static_assert(kPurposeAt + kMaxPurpose + 1 == kHelloBytes);

template <typename Number>
void put(std::uint8_t* at, Number value) {
  std::memcpy(at, &value, sizeof(value));
}

template <typename Number>
Number get(const std::uint8_t* at) {
  Number value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

}  // namespace

HelloBytes encode_hello(const Hello& hello) {
  if (hello.self.purpose.size() > kMaxPurpose) {
    throw std::invalid_argument("purpose '" + hello.self.purpose + "' must have at most " +
                                std::to_string(kMaxPurpose) + " characters");
  }
  HelloBytes bytes{};
  put(bytes.data(), kHelloMagic);
  put(bytes.data() + kVersionAt, hello.version);
  bytes[kVerdictAt] = static_cast<std::uint8_t>(hello.verdict);
  if (hello.verdict == Verdict::kWelcome) {
    std::copy(hello.self.token.begin(), hello.self.token.end(), bytes.begin() + kTokenAt);
  }
  put(bytes.data() + kRankAt, static_cast<std::int32_t>(hello.self.rank));
  put(bytes.data() + kTargetAt, static_cast<std::int32_t>(hello.target));
  std::copy(hello.self.purpose.begin(), hello.self.purpose.end(), bytes.begin() + kPurposeAt);
  return bytes;
}

std::optional<Hello> parse_hello(const std::uint8_t* bytes, std::size_t size_bytes) {
  if (size_bytes != kHelloBytes || get<std::uint32_t>(bytes) != kHelloMagic) {
    return std::nullopt;
  }
  Hello hello;
  hello.version = get<std::uint16_t>(bytes + kVersionAt);
  if (hello.version != kLinkVersion) {
    hello.verdict = Verdict::kOtherVersion;
    return hello;
  }
  const std::uint8_t verdict = bytes[kVerdictAt];
  const std::uint8_t* purpose_end = std::find(bytes + kPurposeAt, bytes + kHelloBytes, 0);
  if (verdict >= static_cast<std::uint8_t>(Verdict::kCount) || bytes[kVerdictAt + 1] != 0 ||
      purpose_end == bytes + kHelloBytes) {
    return std::nullopt;
  }
  hello.verdict = static_cast<Verdict>(verdict);
  std::copy(bytes + kTokenAt, bytes + kRankAt, hello.self.token.begin());
  hello.self.rank = get<std::int32_t>(bytes + kRankAt);
  hello.target = get<std::int32_t>(bytes + kTargetAt);
  hello.self.purpose.assign(bytes + kPurposeAt, purpose_end);
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
  return "of a reason that this version does not know";
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
  RecordHeader header{};
  put(header.data(), kRecordMagic);
  put(header.data() + 4, static_cast<std::uint32_t>(num_bytes));
  put(header.data() + 8, static_cast<std::uint32_t>(num_fds));
  return header;
}

std::size_t parse_record_header(const std::uint8_t* bytes, std::size_t size_bytes,
                                std::size_t max_bytes, std::size_t num_fds) {
  if (size_bytes != kRecordHeaderBytes || get<std::uint32_t>(bytes) != kRecordMagic) {
    throw Error("the peer sent something else than a record: do both run the same version?");
  }
  const std::size_t announced_bytes = get<std::uint32_t>(bytes + 4);
  const std::size_t announced_fds = get<std::uint32_t>(bytes + 8);
  if (announced_bytes > max_bytes) {
    throw Error("a record of " + std::to_string(announced_bytes) + " bytes is above the limit of " +
                std::to_string(max_bytes));
  }
  if (announced_fds != num_fds) {
    throw Error("a record with " + std::to_string(announced_fds) + " descriptors came where " +
                std::to_string(num_fds) + " were due");
  }
  return announced_bytes;
}

}  // namespace adaptive
