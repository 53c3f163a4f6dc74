// A program that runs some test kernels and prints the bytes of their results: equal output on
// two architectures means an equal fiber switch, scheduling and arithmetic.
#include <cstdint>
#include <cstdio>
#include <vector>

extern "C" {
int launch_transpose_and_reverse(const float* in, float* out, void* stream);
int launch_vote(const int* in, int* out, void* stream);
int launch_use_the_stack(float* out, int64_t threads, void* stream);
int launch_matmul(const void* a, const void* b, float* d, int64_t rows, int64_t columns,
                  int64_t depth, int64_t padded, void* stream);
int launch_deadlock(float* out, int64_t broken, void* stream);
int ml_sim_set(const char* name, const char* value);
const char* ml_sim_error(int clear);
}

namespace {

template <class T>
void print(const char* name, int code, const std::vector<T>& values) {
  uint64_t hash = 1469598103934665603u;
  const auto* bytes = reinterpret_cast<const unsigned char*>(values.data());
  for (size_t i = 0; i < values.size() * sizeof(T); ++i) hash = (hash ^ bytes[i]) * 1099511628211u;
  std::printf("%s %d %016llx\n", name, code, static_cast<unsigned long long>(hash));
}

}  // namespace

int main() {
  ml_sim_set("failure", "record");
  for (const char* order : {"fwd", "rev", "rand:5"}) {
    ml_sim_set("order", order);
    std::vector<float> in(1024), out(1024);
    for (int i = 0; i < 1024; ++i) in[i] = static_cast<float>(i) / 3;
    print("transpose", launch_transpose_and_reverse(in.data(), out.data(), nullptr), out);
    std::vector<int> votes(32), voted(320);
    for (int i = 0; i < 32; ++i) votes[i] = i * 7 % 9;
    print("vote", launch_vote(votes.data(), voted.data(), nullptr), voted);
    std::vector<float> sums(300);
    print("stack", launch_use_the_stack(sums.data(), 300, nullptr), sums);
    std::vector<uint16_t> a(64 * 64), b(64 * 64);
    for (int i = 0; i < 64 * 64; ++i) {
      a[i] = static_cast<uint16_t>(0x3f00 + i * 37 % 251);
      b[i] = static_cast<uint16_t>(0xbf00 + i * 53 % 241);
    }
    std::vector<float> d(64 * 64);
    print("matmul", launch_matmul(a.data(), b.data(), d.data(), 64, 64, 64, 1, nullptr), d);
    std::vector<float> never(32);
    print("deadlock", launch_deadlock(never.data(), 1, nullptr), never);
    std::printf("%s", ml_sim_error(1));
  }
  return 0;
}
