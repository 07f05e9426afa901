#include "runtime/isa.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#if defined(TOPG_X86)
#include <cpuid.h>
#include <immintrin.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace topg {
namespace {

struct Isa {
  const char* name;
  const char* needs;  // for a message
  bool usable;
  const Kernels& (*kernels)();
};

#if defined(TOPG_X86)

struct Registers {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(unsigned leaf, unsigned part = 0) {
  Registers r;
  if (__get_cpuid_count(leaf, part, &r.eax, &r.ebx, &r.ecx, &r.edx) == 0) return {};
  return r;
}

constexpr bool bit(unsigned value, int index) { return (value >> index & 1) != 0; }

// Which register files the operating system saves: bits of XCR0.
unsigned long long enabled_state() {
  if (!bit(cpuid(1).ecx, 27)) return 0;  // no XGETBV
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<unsigned long long>(high) << 32) | low;
}

// Linux hands out tile registers on request, once per process.
bool request_tiles() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

struct Features {
  bool avx2, avx512_vnni, bfloat16, amx;
};

Features detect() {
  constexpr unsigned long long kYmm = 0x6, kZmm = 0xe6, kTiles = 0x60000;
  const Registers one = cpuid(1), seven = cpuid(7), seven_one = cpuid(7, 1);
  const unsigned long long state = enabled_state();
  Features f{};
  f.avx2 = (state & kYmm) == kYmm && bit(one.ecx, 12) && bit(one.ecx, 28) && bit(one.ecx, 29) && bit(seven.ebx, 5);
  const bool avx512 = bit(seven.ebx, 16) && bit(seven.ebx, 17) && bit(seven.ebx, 30) && bit(seven.ebx, 31);
  f.avx512_vnni = f.avx2 && (state & kZmm) == kZmm && avx512 && bit(seven.ecx, 11);
  f.bfloat16 = f.avx512_vnni && bit(seven_one.eax, 5);
  const bool amx = bit(seven.edx, 22) && bit(seven.edx, 24) && bit(seven.edx, 25);
  f.amx = f.bfloat16 && (state & kTiles) == kTiles && amx && request_tiles();
  return f;
}

// Slowest first.
const std::vector<Isa>& isas() {
  static const Features f = detect();
  static const std::vector<Isa> all = {
      {"scalar", "any processor", true, scalar_kernels},
      {"avx2", "AVX2, FMA and F16C", f.avx2, avx2_kernels},
      {"avx512_vnni", "AVX-512 F, BW, DQ, VL and VNNI", f.avx512_vnni,
       f.bfloat16 ? avx512_vnni_bf16_kernels : avx512_vnni_kernels},
      {"amx", "AVX-512 with bfloat16, and AMX tiles for int8 and bfloat16", f.amx, amx_kernels},
  };
  return all;
}

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Eight tiles of 16 rows of 64 bytes: their largest shape.  Kernels that use fewer rows fill them up.
// In assembly: the intrinsic does not tell the compiler that all 64 bytes are read.
void configure_tiles() {
  TileConfig config;
  for (int i = 0; i < 8; ++i) config.row_bytes[i] = 64, config.rows[i] = 16;
  asm volatile("ldtilecfg %0" ::"m"(config));
}

#else

const std::vector<Isa>& isas() {
  static const std::vector<Isa> all = {{"scalar", "any processor", true, scalar_kernels}};
  return all;
}

#endif

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

}  // namespace

std::vector<std::string> built_isas() {
  std::vector<std::string> names;
  for (const Isa& isa : isas()) names.push_back(isa.name);
  return names;
}

std::vector<std::string> usable_isas() {
  std::vector<std::string> names;
  for (const Isa& isa : isas()) {
    if (isa.usable) names.push_back(isa.name);
  }
  return names;
}

const Kernels& kernels_for(const std::string& name) {
  const std::string wanted = name.empty() ? usable_isas().back() : name;
  for (const Isa& isa : isas()) {
    if (wanted != isa.name) continue;
    if (isa.usable) return isa.kernels();
    throw std::invalid_argument("instruction set '" + wanted + "' needs " + isa.needs +
                                ", which this processor or its operating system lacks; usable here: " +
                                joined(usable_isas()));
  }
  throw std::invalid_argument("no instruction set is called '" + wanted + "'; usable here: " + joined(usable_isas()));
}

void enter_isa(const Kernels& kernels) {
#if defined(TOPG_X86)
  constexpr unsigned kFlushDenormals = 0x8040;  // FTZ and DAZ
  _mm_setcsr(_mm_getcsr() | kFlushDenormals);
  if (std::strcmp(kernels.isa, "amx") == 0) configure_tiles();
#else
  (void)kernels;
#endif
}

}  // namespace topg
