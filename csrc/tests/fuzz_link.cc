// Fuzzer of a link's hello and of the header of its records. Parts: csrc/common/hello.cc
#include <algorithm>
#include <optional>

#include "common/error.h"
#include "common/hello.h"
#include "tests/fuzz.h"

namespace {

using adaptive::Hello;
using adaptive::HelloBytes;
using adaptive::Identity;
using adaptive::RecordHeader;
using adaptive::Verdict;
using adaptive::testing::FuzzInput;
using adaptive::testing::must;

Identity self() {
  Identity identity;
  identity.token.fill(0x6b);
  identity.rank = 4;
  identity.purpose = "shm";
  return identity;
}

void fuzz_hello(const std::uint8_t* data, std::size_t size) {
  const std::optional<Hello> hello = adaptive::parse_hello(data, size);
  if (!hello) {
    return;
  }
  must(size == adaptive::kHelloBytes, "a hello of the right size");
  const Verdict verdict = adaptive::judge_hello(*hello, self());
  must(adaptive::reason_of(verdict) != nullptr && adaptive::reason_of(hello->verdict) != nullptr,
       "words for it");
  if (hello->version != adaptive::kLinkVersion) {
    must(verdict == Verdict::kOtherVersion, "no other version");
    return;
  }
  must(hello->self.purpose.size() <= adaptive::kMaxPurpose, "a purpose that fits");
  must(verdict != Verdict::kWelcome ||
           (adaptive::same_token(hello->self.token, self().token) && hello->target == 4),
       "nobody welcome without the token");
  const std::optional<Hello> again =
      adaptive::parse_hello(adaptive::encode_hello(*hello).data(), adaptive::kHelloBytes);
  must(again && again->self.rank == hello->self.rank && again->target == hello->target &&
           again->self.purpose == hello->self.purpose && again->verdict == hello->verdict,
       "the same after encoding it again");
}

void fuzz_record(const std::uint8_t* data, std::size_t size) {
  try {
    const std::size_t num_bytes = adaptive::parse_record_header(data, size, 1000, 2);
    must(num_bytes <= 1000, "a record within the limit");
    const RecordHeader header = adaptive::encode_record_header(num_bytes, 2);
    must(std::equal(header.begin(), header.end(), data), "the same after encoding it again");
  } catch (const adaptive::Error&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz_hello(data, size);
  fuzz_record(data, size);
  return 0;
}

std::vector<FuzzInput> adaptive::testing::fuzz_seeds() {
  Hello hello;
  hello.self = self();
  hello.target = 4;
  const HelloBytes welcome = encode_hello(hello);
  hello.version = 2;
  const HelloBytes other = encode_hello(hello);
  const RecordHeader record = encode_record_header(1000, 2);
  return {FuzzInput(welcome.begin(), welcome.end()), FuzzInput(other.begin(), other.end()),
          FuzzInput(record.begin(), record.end())};
}
