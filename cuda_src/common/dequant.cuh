// Packed 4-bit weights in shared memory, and the matrix fragments made of them in registers.
//
// A byte holds two neighbours along K, the first in its low nibble. One byte becomes one register of a fragment, so the
// same three or five instructions serve both storage orders: K contiguous (N rows of K / 2 bytes) and N contiguous.
#pragma once
#include "mma.cuh"

namespace rawops {

// The numbers are those of FORMATS in _gemm_w4.py. kInt4 is two's complement, kFloat4 e2m1: 0, .5, 1, 1.5, 2, 3, 4, 6.
enum WeightFormat : int { kInt4, kUint4, kFloat4 };

// What the conversions need to know of a 16-bit type.
template <class T> struct Half;
template <> struct Half<__half> {
    using Pair = __half2;
    static constexpr uint32_t kInteger = 0x64006400;  // 1024, whose last bit counts ones
    static constexpr uint32_t kRebias = 0x74007400;   // 2^14 takes e2m1's exponents to this type's
    static constexpr int kExponentShift = 3;          // from the top of 16 bits down to the place of e2m1's exponent
    static constexpr uint32_t kFloat4Mask = 0x8e008e00;
    static constexpr uint64_t kFloat4Low = 0, kFloat4High = 0x464442403e3c3800;  // bytes of the eight magnitudes
    static __device__ Pair both(float x) { return __float2half2_rn(x); }
};
template <> struct Half<__nv_bfloat16> {
    using Pair = __nv_bfloat162;
    static constexpr uint32_t kInteger = 0x43004300;  // 128
    static constexpr uint32_t kRebias = 0x7e807e80;   // 2^126
    static constexpr int kExponentShift = 6;
    static constexpr uint32_t kFloat4Mask = 0x81c081c0;
    static constexpr uint64_t kFloat4Low = 0xc0804000c0800000, kFloat4High = 0x404040403f3f3f00;
    static __device__ Pair both(float x) { return __float2bfloat162_rn(x); }
};

template <class To, class From> __device__ inline To bits_as(From x) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    return *reinterpret_cast<To*>(&x);
}

// A code in each half of a word as two T, exact for every format. The code is in the lowest bits of its half, of
// kFloat4 in the highest; the others may be anything.
template <class T, int kFormat> __device__ inline uint32_t convert_codes(uint32_t codes) {
    using Pair = typename Half<T>::Pair;
    if constexpr (kFormat == kFloat4) {  // sign, exponent and mantissa to their places, the exponent off by a bias
        const uint32_t top = codes & 0xf000f000;
        const uint32_t placed = (top | top >> Half<T>::kExponentShift) & Half<T>::kFloat4Mask;
        return bits_as<uint32_t>(__hmul2(bits_as<Pair>(placed), bits_as<Pair>(Half<T>::kRebias)));
    } else {  // q as the last bits of a power of two, which is subtracted; two's complement is q ^ 8 less 8
        constexpr uint32_t kBias = kFormat == kInt4 ? Half<T>::kInteger | 0x00080008 : Half<T>::kInteger;
        uint32_t biased;  // (codes & 0x000f000f) ^ kBias, with the mask in a register: the compiler moves it anew
        asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(biased) : "r"(codes), "r"(0x000f000f), "n"(kBias));
        return bits_as<uint32_t>(__hsub2(bits_as<Pair>(biased), bits_as<Pair>(kBias)));
    }
}

// Four bytes of weights. pair(i) is byte i as two T, exact for every format.
template <class T, int kFormat> class PackedWeights {
public:
    __device__ explicit PackedWeights(uint32_t word)
        : first(kFormat == kFloat4 ? word << 4 : word), second(kFormat == kFloat4 ? word : word >> 4) {}

    __device__ uint32_t pair(int byte) const {
        return convert_codes<T, kFormat>(__byte_perm(first, second, 0x4400 + byte * 0x1111));
    }

private:
    uint32_t first, second;  // words whose bytes hold the first and the second element where pair() wants them
};

// Codes that stay where they are in a byte are numbers below the least normal one. A multiplication takes low and high
// nibbles to the same small unit, and what to subtract from them costs no instruction more.
template <class T> struct SmallIntegers;
template <> struct SmallIntegers<__half> {
    static constexpr float kUnit = 1.0f / 512;
    static constexpr uint32_t kPowers = 0x68007800;  // 2^15 for low nibbles in the lower half, 2^11 for high ones
};
template <> struct SmallIntegers<__nv_bfloat16> {
    static constexpr float kUnit = 1.0f / 128;
    static constexpr uint32_t kPowers = 0x7c807e80;  // 2^126, 2^122
};

// Two weights as a pair of T: exact, but kFactor times smaller.
template <class T, int kFormat> struct SmallWeights {
    using Pair = typename Half<T>::Pair;
    static constexpr float kUnit = SmallIntegers<T>::kUnit, kFactor = 1 / kUnit;
    static constexpr uint32_t kConstant = SmallIntegers<T>::kPowers;

    // Less a zero point, or what two's complement has instead: exact while integers up to 256 are.
    struct Offsets {
        Pair less = Half<T>::both(kFormat == kInt4 ? -8 * kUnit : -0.0f);
        __device__ void set(int zero) { less = Half<T>::both(-kUnit * float(zero)); }
    };

    // What two bytes hold, of which each half of `both` has one copy. `constant` is kConstant, in a way that the
    // compiler does not see: it would move it to a register anew for each pair.
    static __device__ void pairs(uint32_t& lower, uint32_t& upper, uint32_t both, uint32_t constant,
                                 const Offsets& of_lower, const Offsets& of_upper) {
        lower = convert<0x00f0000f>(both, constant, of_lower);
        upper = convert<0x00f0000f>(both >> 8, constant, of_upper);
    }

    // Elements i and i + 4 of the eight in a word.
    static __device__ uint32_t pair_apart(uint32_t word, int i, const Offsets& offsets) {
        const uint32_t codes = i < 2 ? word : word >> 8;
        if (i % 2 == 0) return convert<0x000f000f>(codes, (SmallIntegers<T>::kPowers & 0xffff) * 0x10001, offsets);
        return convert<0x00f000f0>(codes, (SmallIntegers<T>::kPowers >> 16) * 0x10001, offsets);
    }

private:
    template <uint32_t kMask>
    static __device__ uint32_t convert(uint32_t codes, uint32_t powers, const Offsets& offsets) {
        constexpr uint32_t kFlip = kFormat == kInt4 ? kMask & 0x00880088 : 0;
        uint32_t small;  // (codes & kMask) ^ kFlip, with the mask in a register: see convert_codes
        asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(small) : "r"(codes), "r"(kMask), "n"(kFlip));
        return bits_as<uint32_t>(__hfma2(bits_as<Pair>(small), bits_as<Pair>(powers), offsets.less));
    }
};
template <class T> struct SmallWeights<T, kFloat4> {
    static constexpr float kFactor = 1;
    static constexpr uint32_t kConstant = 0x80808080;
    struct Offsets {
        __device__ void set(int) {}
    };
    // The four codes are the selector of a permutation: three bits of each choose a byte of a table, and with the
    // fourth a byte becomes eight copies of its sign.
    static __device__ void pairs(uint32_t& lower, uint32_t& upper, uint32_t both, uint32_t constant, const Offsets&,
                                 const Offsets&) {
        constexpr uint64_t kLow = Half<T>::kFloat4Low, kHigh = Half<T>::kFloat4High;
        const uint32_t magnitudes = both & 0x7777;
        uint32_t low = 0, signs;  // of negative numbers 0xff, of others 0x80
        asm("prmt.b32 %0, %1, %1, %2;" : "=r"(signs) : "r"(constant), "r"(both));
        uint32_t high = __byte_perm(uint32_t(kHigh), uint32_t(kHigh >> 32), magnitudes);
        high |= signs << 1 & kConstant;
        if constexpr (kLow != 0) low = __byte_perm(uint32_t(kLow), uint32_t(kLow >> 32), magnitudes);
        lower = __byte_perm(low, high, 0x5140);
        upper = __byte_perm(low, high, 0x7362);
    }
    static __device__ uint32_t pair_apart(uint32_t word, int i, const Offsets&) {
        return convert_codes<T, kFloat4>(word << (12 - 4 * i));
    }
};

// Eight neighbours, two in a register, in that order.
__device__ inline void pair_apart(uint32_t (&r)[4]) {
    const uint32_t pairs[4] = {__byte_perm(r[0], r[2], 0x5410), __byte_perm(r[0], r[2], 0x7632),
                               __byte_perm(r[1], r[3], 0x5410), __byte_perm(r[1], r[3], 0x7632)};
#pragma unroll
    for (int i = 0; i < 4; ++i) r[i] = pairs[i];
}

// The zero points of the four columns whose weights a lane dequantises together, subtracted in T: exact while integers
// up to 256 are.
template <class T> struct ZeroPoints {
    using Pair = typename Half<T>::Pair;
    Pair value[4];

    __device__ uint32_t subtract_from(uint32_t pair, int column) const {
        return bits_as<uint32_t>(__hsub2(bits_as<Pair>(pair), value[column]));
    }
};
struct NoZeroPoints {
    __device__ uint32_t subtract_from(uint32_t pair, int) const { return pair; }
};

__device__ inline void load_shared(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// Fragments of 32 weight columns x 32 of K for a warp: two atoms of 16 rows (the columns) x two steps of 16 along K.
// With g = lane / 4 and t = lane % 4, a lane holds four words. K-major: word w is 4 bytes, K 8t .. 8t + 7, of column
// 8w + g. Else byte c of word w is K 8w + 2t and 8w + 2t + 1 of column 4g + c.
// In both, step s multiplies what TokenReader holds in registers 2s and 2s + 1.
template <class T, int kFormat, class Tile, bool kKMajor> struct WeightReader {
    int lane_offset;

    __device__ WeightReader(int n_begin, int k_begin, int lane)
        : lane_offset(kKMajor ? Tile::offset(n_begin + lane, k_begin / 2)
                              : Tile::offset(k_begin / 2 + lane % 4, n_begin + lane / 4 * 4)) {}

    // Which of the 32 columns is a lane's i-th: the one in rows g of atom i / 2, the upper eight or (odd i) the lower.
    static __device__ int column(int i, int lane) { return kKMajor ? i * 8 + lane / 4 : lane / 4 * 4 + i; }

    __device__ void load(uint32_t (&words)[4], uint32_t tile, int k_step) const {
        if constexpr (kKMajor) {
            ldmatrix<false>(words, tile + Tile::moved(lane_offset, 0, k_step * 16));
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) load_shared(words[i], tile + Tile::moved(lane_offset, k_step * 16 + i * 4, 0));
        }
    }

    // a[atom][step] are the A fragments.
    template <class Zeros>
    static __device__ void dequantise(uint32_t (&a)[2][2][4], const uint32_t (&words)[4], const Zeros& zeros) {
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const PackedWeights<T, kFormat> packed(words[w]);
#pragma unroll
            for (int byte = 0; byte < 4; ++byte) {
                const int column = kKMajor ? w : byte, k = kKMajor ? byte : w;
                a[column / 2][k / 2][k % 2 * 2 + column % 2] = zeros.subtract_from(packed.pair(byte), column);
            }
        }
    }
};

// Reads fragments of 8 tokens (rows of the activations) x 32 of K: the B fragments of two steps along K, in the order
// of K that WeightReader's words have.
template <class Tile, bool kKMajor, bool kWeightsKMajor> struct TokenReader {
    int lane_offset;

    __device__ TokenReader(int m_begin, int k_begin, int lane) {
        const int g = lane / 4, t = lane % 4, matrix = lane / 8, row = lane % 8;
        if constexpr (kKMajor && kWeightsKMajor) {
            lane_offset = Tile::offset(m_begin + g, k_begin + t * 8);
        } else if constexpr (kKMajor) {
            lane_offset = Tile::offset(m_begin + row, k_begin + matrix * 8);
        } else {  // row r of a matrix comes to lanes t = r / 2, as first or second of the pair
            const int k = kWeightsKMajor ? row / 2 * 8 + matrix * 2 + row % 2 : lane;
            lane_offset = Tile::offset(k_begin + k, m_begin);
        }
    }

    __device__ void load(uint32_t (&r)[4], uint32_t tile, int token_step, int k_step) const {
        if constexpr (!kKMajor) {
            ldmatrix<true>(r, tile + Tile::moved(lane_offset, k_step * 32, token_step * 8));
        } else {
            const uint32_t address = tile + Tile::moved(lane_offset, token_step * 8, k_step * 32);
            if constexpr (kWeightsKMajor) load_shared(r, address);
            else ldmatrix<false>(r, address);
        }
    }
};

}  // namespace rawops
