// Bandwidth and latency of a channel between two ranks of tests/labs/rdma_lab, to be compared with
// ib_write_bw and ib_write_lat. Prints one line per measurement on rank 0:
//
//   rdma_measure bandwidth SIZE COUNT | latency SIZE COUNT
//                [slots=16] [qps=1] [write=0] [reserve=0] [slot=SIZE] [crc=0]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <thread>

#include "tests/rdma_lab.h"

namespace {

using namespace adaptive;           // NOLINT: a test
using namespace adaptive::testing;  // NOLINT
using Clock = std::chrono::steady_clock;

using Settings = std::map<std::string, double>;

// As perftest does: in the lab's virtual machines the clock is a system call, slower than a
// message.
std::uint64_t ticks() {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#else
  return static_cast<std::uint64_t>(Clock::now().time_since_epoch().count());
#endif
}

double since_us(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

std::shared_ptr<void> keep_nothing(void*) {
  return nullptr;  // the memory of this program lives long enough
}

void send_one(Sender& sender, const std::vector<std::byte>& data, bool reserve) {
  const Message message = message_of(data.size(), 0);
  if (reserve) {
    if (auto part = sender.reserve(data.size())) {
      sender.commit(message, std::move(*part));
      return;
    }
  }
  sender.send(message, data.data(), Keeper{&keep_nothing, nullptr});
}

void bandwidth(Lab& lab, End& end, std::size_t size, int count, bool reserve) {
  const std::vector<std::byte> data(size);
  for (int round = 0; round < 2; ++round) {  // the first warms up
    const int now = round == 0 ? std::max(2, count / 10) : count;
    lab.meet();
    const auto start = Clock::now();
    if (lab.rank() == 0) {
      for (int i = 0; i < now; ++i) {
        // A caller of this would bound what waits, too.
        while (end.sender->pending() > 4) {
          check(end.sender->flush(patient()), "progress");
        }
        send_one(*end.sender, data, reserve);
      }
      check(end.sender->flush(patient()), "the end");
      const double us = since_us(start);
      if (round == 1) {
        std::printf("bandwidth %zu B: %.2f MB/s\n", size,
                    static_cast<double>(size) * now / us * 1e6 / (1 << 20));
      }
    } else {
      for (int i = 0; i < now; ++i) {
        next_arrival(*end.session.completions);
      }
    }
  }
}

void latency(Lab& lab, End& end, std::size_t size, int count, bool reserve) {
  const std::vector<std::byte> data(size);
  std::vector<double> half_us;
  half_us.reserve(static_cast<std::size_t>(count));
  lab.meet();
  const auto began = Clock::now();
  const std::uint64_t began_ticks = ticks();
  for (int i = 0; i < count + 50; ++i) {
    const std::uint64_t start = ticks();
    if (lab.rank() == 0) {
      send_one(*end.sender, data, reserve);
      next_arrival(*end.session.completions);
      if (i >= 50) {
        half_us.push_back(static_cast<double>(ticks() - start) / 2);
      }
    } else {
      next_arrival(*end.session.completions);
      send_one(*end.sender, data, reserve);
    }
  }
  if (lab.rank() == 0) {
    const double us_per_tick = since_us(began) / static_cast<double>(ticks() - began_ticks);
    double sum = 0;
    for (double& us : half_us) {
      us *= us_per_tick;
      sum += us;
    }
    std::sort(half_us.begin(), half_us.end());
    const std::size_t n = half_us.size();
    std::printf("latency %zu B: min %.2f median %.2f mean %.2f p99 %.2f us\n", size, half_us[0],
                half_us[n / 2], sum / static_cast<double>(n), half_us[n * 99 / 100]);
  }
}

}  // namespace

int main(int argc, char** argv) {
  Lab lab;
  const std::string what = argc > 1 ? argv[1] : "";
  if (argc < 4 || (what != "bandwidth" && what != "latency")) {
    std::fprintf(stderr, "usage: rdma_measure bandwidth|latency SIZE COUNT [name=value ...]\n");
    return 2;
  }
  const auto size = static_cast<std::size_t>(std::stoul(argv[2]));
  const int count = std::stoi(argv[3]);
  Settings settings{{"slots", 16},  {"qps", 1},  {"write", 0},
                    {"reserve", 0}, {"slot", 0}, {"crc", 0}};
  for (int i = 4; i < argc; ++i) {
    const std::string text = argv[i];
    const auto equals = text.find('=');
    settings[text.substr(0, equals)] = std::stod(text.substr(equals + 1));
  }
  RdmaOptions options;
  options.slots = static_cast<unsigned>(settings["slots"]);
  options.num_qps = static_cast<unsigned>(settings["qps"]);
  options.write_bytes = static_cast<std::size_t>(settings["write"]);
  options.crc = settings["crc"] != 0;
  options.slot_bytes = static_cast<std::size_t>(settings["slot"]);
  if (options.slot_bytes == 0) {
    options.slot_bytes = std::max<std::size_t>(size, 4096);
  }
  End end(lab, lab.next_port(), options);
  if (what == "bandwidth") {
    bandwidth(lab, end, size, count, settings["reserve"] != 0);
  } else {
    latency(lab, end, size, count, settings["reserve"] != 0);
  }
  end.close();
  lab.meet();
  return 0;
}
