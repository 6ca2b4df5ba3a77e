// Functions that encode and decode the two kinds of frames of a link. Before a channel exists, they
// are the only code that checks the bytes from another process.
//
//   hello   magic 4 | version 2 | verdict 1 | zero 1 | token 16 | rank 4 | target rank 4 | purpose
//   16 record  magic 4 | number of bytes 4 | number of descriptors 4, then the bytes
//
// All numbers are little endian.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "common/link.h"

namespace adaptive {

constexpr std::uint16_t kLinkVersion = 1;
constexpr std::size_t kHelloBytes = 48;
constexpr std::size_t kRecordHeaderBytes = 12;
constexpr std::size_t kMaxPurpose = 15;

// The listener's reply to a hello. Every reply except kWelcome closes the connection and does not
// contain the token.
enum class Verdict : std::uint8_t {
  kWelcome = 0,
  kOtherVersion,
  kOtherToken,
  kOtherTarget,  // the connection was meant for another rank
  kCount
};

struct Hello {
  Identity self;
  int target = -1;
  Verdict verdict = Verdict::kWelcome;
  std::uint16_t version = kLinkVersion;
};

using HelloBytes = std::array<std::uint8_t, kHelloBytes>;

HelloBytes encode_hello(const Hello& hello);

// Returns an empty value if the bytes are not a hello. If the hello has another version, only
// `version` is set.
std::optional<Hello> parse_hello(const std::uint8_t* bytes, std::size_t size_bytes);

// Returns the listener's reply to a hello.
Verdict judge_hello(const Hello& hello, const Identity& self);

const char* reason_of(Verdict verdict);

// Compares tokens in constant time.
bool same_token(const Token& one, const Token& other) noexcept;

using RecordHeader = std::array<std::uint8_t, kRecordHeaderBytes>;

RecordHeader encode_record_header(std::size_t num_bytes, std::size_t num_fds);

// Returns the number of bytes that follow. Throws Error unless the record has at most max_bytes and
// exactly num_fds descriptors.
std::size_t parse_record_header(const std::uint8_t* bytes, std::size_t size_bytes,
                                std::size_t max_bytes, std::size_t num_fds);

}  // namespace adaptive
