// Runs a fuzzer without libFuzzer; see fuzz.h.
//
//   <program>                    the seeds, then 200000 changes of them
//   <program> --runs N
//   <program> FILE...            these inputs
#include <algorithm>
#include <fstream>
#include <iterator>
#include <random>
#include <string>

#include "tests/fuzz.h"

namespace {

using adaptive::testing::FuzzInput;

using Random = std::mt19937_64;

std::size_t below(Random& random, std::size_t limit) {
  return std::uniform_int_distribution<std::size_t>(0, limit - 1)(random);
}

// Returns a number that often reveals errors if it is used as a length or a count.
std::uint64_t interesting(Random& random) {
  constexpr std::uint64_t kValues[] = {0,          1,       2,      7,           8,
                                       63,         64,      127,    128,         255,
                                       256,        0x7fff,  0xffff, 0x7fffffff,  0x80000000,
                                       0xffffffff, 1 << 20, ~0ULL,  ~0ULL >> 1U, 1ULL << 63U};
  return kValues[below(random, std::size(kValues))];
}

void change(FuzzInput& input, const FuzzInput& other, Random& random) {
  const std::size_t at = input.empty() ? 0 : below(random, input.size());
  const auto place = input.begin() + static_cast<std::ptrdiff_t>(at);
  switch (below(random, 7)) {
    case 0:
      if (!input.empty()) {
        *place = static_cast<std::uint8_t>(*place ^ (1U << below(random, 8)));
      }
      break;
    case 1:
      if (!input.empty()) {
        *place = static_cast<std::uint8_t>(random());
      }
      break;
    case 2: {
      const std::uint64_t value = interesting(random);
      const std::size_t width = std::size_t{1} << below(random, 4);
      if (input.size() - at >= width) {
        std::memcpy(input.data() + at, &value, width);
      }
      break;
    }
    case 3:
      input.erase(place, input.end());
      break;
    case 4:
      input.insert(place, below(random, 200), static_cast<std::uint8_t>(random()));
      break;
    case 5:
      if (!input.empty()) {
        input.erase(place,
                    place + static_cast<std::ptrdiff_t>(
                                below(random, std::min<std::size_t>(input.size() - at, 16)) + 1));
      }
      break;
    default:
      input.insert(place, other.begin(), other.end());
      break;
  }
}

void run(const FuzzInput& input) {
  // Uses a copy of exactly this size on the heap, so that a sanitizer detects every access past its
  // end.
  const FuzzInput exact(input.begin(), input.end());
  LLVMFuzzerTestOneInput(exact.data(), exact.size());
}

int play_back(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    std::ifstream file(argv[i], std::ios::binary);
    if (!file) {
      std::fprintf(stderr, "cannot read '%s'\n", argv[i]);
      return 1;
    }
    run(FuzzInput(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()));
  }
  std::printf("%d inputs\n", argc - 1);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const bool counts = argc == 3 && std::string(argv[1]) == "--runs";
  if (argc > 1 && !counts) {
    return play_back(argc, argv);
  }
  const unsigned long runs = counts ? std::stoul(argv[2]) : 200'000;
  const std::vector<FuzzInput> seeds = adaptive::testing::fuzz_seeds();
  for (const FuzzInput& input : seeds) {
    run(input);
  }
  Random random(1);
  for (unsigned long i = 0; i < runs; ++i) {
    FuzzInput input = seeds[below(random, seeds.size())];
    for (std::size_t changes = below(random, 6) + 1; changes != 0; --changes) {
      change(input, seeds[below(random, seeds.size())], random);
    }
    input.resize(std::min<std::size_t>(input.size(), std::size_t{1} << 16));
    run(input);
  }
  std::printf("%zu seeds and %lu changes of them\n", seeds.size(), runs);
  return 0;
}
