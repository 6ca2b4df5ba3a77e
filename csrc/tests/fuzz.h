// The common part of the fuzzers. There is one file per parser, which defines the two functions
// below. A fuzzer can be built in two ways:
//
//   clang++ -std=c++17 -g -O1 -I csrc -pthread -fsanitize=fuzzer,address,undefined <fuzzer> <parts>
//   c++     -std=c++17 -g -O1 -I csrc -pthread -fsanitize=address,undefined <fuzzer>
//           csrc/tests/fuzz_main.cc <parts>
//
// The first searches for inputs itself. The second does not need clang. It runs the files in its
// arguments; without arguments, it runs the seeds and a fixed number of random changes of the
// seeds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace adaptive::testing {

using FuzzInput = std::vector<std::uint8_t>;

// Inputs that the parser accepts, as seeds.
std::vector<FuzzInput> fuzz_seeds();

// Checks a property that must hold for every input. If it does not hold, aborts the process, which
// a fuzzer detects.
inline void must(bool holds, const char* what) {
  if (!holds) {
    std::fprintf(stderr, "must hold: %s\n", what);
    std::abort();
  }
}

template <typename Value>
void append(FuzzInput& input, const Value& value) {
  static_assert(std::is_trivially_copyable_v<Value>);
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(&value);
  input.insert(input.end(), bytes, bytes + sizeof(value));
}

// Reads the bytes of an input as one value after the other. Returns zeros after the end of the
// input.
class FuzzReader {
 public:
  FuzzReader(const std::uint8_t* data, std::size_t size) : data_(data), left_(size) {}

  template <typename Value>
  Value take() {
    Value value{};
    static_assert(std::is_trivially_copyable_v<Value>);
    const std::size_t count = left_ < sizeof(value) ? left_ : sizeof(value);
    if (count != 0) {
      std::memcpy(static_cast<void*>(&value), data_, count);
      data_ += count;
      left_ -= count;
    }
    return value;
  }

  const std::uint8_t* data() const { return data_; }
  std::size_t left() const { return left_; }

 private:
  const std::uint8_t* data_;
  std::size_t left_;
};

}  // namespace adaptive::testing
